// layer_forward: y[t] = addend[t] + sum over the rows of token t of s * expert(x[t]); sorted rows: y[r] = s * expert(x[r]).
// x, y (T, H), z (R, G*I) when it is kept. A block of rows goes through both projections in one worker's scratch: a is never
// stored, and the rows before their sum live for one chunk of tokens. 6 R I H flops (gated). Verify: intarsia-ops verify
// layer_forward
#include "base/parallel.h"
#include "cpu/blocks.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include "cpu/token_chunks.h"
#include "plan/blocking.h"
#include "plan/layer_workspace.h"

namespace intarsia::cpu {
namespace {

UpForward up_forward(const LayerForward& op) {
  return {.x = op.x,
          .expert_offsets = op.expert_offsets,
          .row_token = op.row_token,
          .w_up = op.w_up,
          .b_up = op.b_up,
          .scores = op.scores,
          .row_slot = op.row_slot,
          .activation = op.activation,
          .score_on = op.score_on,
          .z = op.z};
}

/// The token forms leave a score on the output to the sum.
DownForward down_forward(const LayerForward& op) {
  const bool score_later = op.row_token.defined() && op.score_on == ScorePlacement::output;
  return {.expert_offsets = op.expert_offsets,
          .w_down = op.w_down,
          .b_down = op.b_down,
          .scores = score_later ? TensorView{} : op.scores,
          .row_slot = op.row_slot,
          .score_on = op.score_on};
}

class Forward {
 public:
  Forward(const LayerForward& op, const Execution& execution)
      : op_(op),
        up_(up_forward(op)),
        down_(down_forward(op)),
        shape_(layer_shape(op)),
        blocking_(cpu_blocking(shape_)),
        space_(shape_, {.threads = execution.workers}, false, execution.workspace),
        segments_(reinterpret_cast<std::int32_t*>(space_.memory("segments")), op.expert_offsets, blocking_.block_rows),
        workers_(execution.workers) {}

  void run() {
    if (shape_.sorted_rows) sorted_rows();
    else tokens();
  }

 private:
  /// Both projections of every block of the current segments.
  void expert_rows(const RowTarget& target) {
    std::byte* memory = space_.memory("scratch");
    parallel_for(segments_.tasks(), workers_, [&](std::int64_t task, int worker) {
      const RowBlock block = segments_.block(task);
      const Scratch scratch(memory, blocking_, worker);
      const TensorView a = scratch_rows(scratch.right, shape_.dtype, padded(block.count), shape_.width);
      zero_rows_from(a, block.count);  // multiplied as padding, never read again
      up_forward_block(up_, block, a, scratch);
      down_forward_block(down_, block, a, target, scratch);
    });
  }

  void tokens() {
    const TokenLists lists(op_, shape_.tokens);
    const TensorView rows = space_.matrix("rows");
    const ChunkCombine combine{lists, rows, op_.score_on == ScorePlacement::output ? op_.scores : TensorView{}, op_.addend,
                               op_.y};
    segments_.restart();
    for (std::int64_t token = 0; token < shape_.tokens;) {
      const TokenChunk chunk = lists.chunk(token, blocking_.chunk_rows);
      segments_.take_tokens(lists.row_token, chunk.end_token);
      expert_rows({.rows = rows, .position = lists.row_slot, .origin = chunk.first_slot});
      combine.run(chunk, workers_);
      token = chunk.end_token;
    }
  }

  void sorted_rows() {
    segments_.take_all();
    expert_rows({.rows = op_.y});
    zero_rows_from(op_.y, list(op_.expert_offsets)[shape_.experts]);
  }

  const LayerForward& op_;
  UpForward up_;
  DownForward down_;
  LayerShape shape_;
  CpuBlocking blocking_;
  LayerWorkspace space_;
  Segments segments_;
  int workers_;
};

}  // namespace

std::size_t workspace_bytes(const LayerForward& op, int workers) {
  return LayerWorkspace(layer_shape(op), {.threads = workers}, false, nullptr).bytes();
}

void run(const LayerForward& op, const Execution& execution) { Forward(op, execution).run(); }

}  // namespace intarsia::cpu
