// INTARSIA_CHECK=1 without a GPU: device views of host memory, copied by memcpy, are refused in the sentences of the CPU.
#include "api/host_lists.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "api/validate.h"
#include "intarsia/error.h"

namespace intarsia {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

/// Three tokens that both chose both experts; x stands for every tensor whose values nobody reads.
struct Lists {
  std::vector<std::int32_t> offsets{0, 3, 6}, row_token{0, 1, 2, 0, 1, 2}, row_slot{0, 2, 4, 1, 3, 5},
      slot_row{0, 3, 1, 4, 2, 5};
  std::vector<std::int32_t> token_offsets{0, 2, 4, 6}, token_rows{0, 3, 1, 4, 2, 5};
  std::vector<float> x = std::vector<float>(64);

  LayerForward layer(Device device, bool csr) {
    auto floats = [&, i = 0](std::initializer_list<std::int64_t> shape) mutable {
      return TensorView(x.data() + i++, DType::float32, shape, device);  // distinct addresses
    };
    const auto ints = [&](std::vector<std::int32_t>& v) {
      return TensorView(v.data(), DType::int32, {static_cast<std::int64_t>(v.size())}, device);
    };
    LayerForward op{.x = floats({3, 4}),
                    .expert_offsets = ints(offsets),
                    .row_token = ints(row_token),
                    .row_slot = ints(row_slot),
                    .scores = csr ? floats({6}) : floats({3, 2}),
                    .w_up = {.weight = floats({2, 4, 4})},
                    .w_down = {.weight = floats({2, 4, 2})},
                    .y = floats({3, 4})};
    if (csr) {
      op.token_offsets = ints(token_offsets);
      op.token_rows = ints(token_rows);
    } else {
      op.slot_row = TensorView(slot_row.data(), DType::int32, {3, 2}, device);
    }
    return op;
  }
};

std::string refusal(const LayerForward& op) {
  try {
    validate(op);
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

std::string refusal_on_host(const LayerForward& op) {
  HostLists lists([](void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); });
  return refusal(lists.of(op));
}

TEST(HostLists, EveryWrongListIsRefusedAsOnTheCpu) {
  const auto expect = [](auto&& spoil, bool csr, const std::string& part) {
    Lists p;
    spoil(p);
    EXPECT_EQ(refusal(p.layer(kGpu, csr)), "") << "the host must not read a GPU's memory";
    const std::string why = refusal_on_host(p.layer(kGpu, csr));
    EXPECT_NE(why.find(part), std::string::npos) << "got: " << why;
    EXPECT_EQ(why, refusal(p.layer({}, csr)));
  };
  for (const bool csr : {false, true}) {
    expect([](Lists& p) { p.offsets[1] = 7; }, csr, "expert_offsets: expected ascending offsets");
    expect([](Lists& p) { p.row_token[2] = 3; }, csr, "row_token: expected values in [0, 3)");
    expect([](Lists& p) { std::swap(p.row_token[0], p.row_token[1]); }, csr, "row_token: expected ascending tokens");
  }
  expect([](Lists& p) { std::swap(p.row_slot[0], p.row_slot[1]); }, false, "row_slot: is not the inverse");
  expect([](Lists& p) { p.slot_row[4] = 6; }, false, "slot_row: expected -1 or rows in [0, 6)");
  expect([](Lists& p) { p.token_offsets[3] = 7; }, true, "token_offsets: expected a last offset of at most 6");
  expect([](Lists& p) { p.token_rows[1] = -1; }, true, "token_rows: expected values in [0, 6)");
}

TEST(HostLists, RightListsPassAndStayWhereTheyAre) {
  for (const bool csr : {false, true}) {
    Lists p;
    const LayerForward op = p.layer(kGpu, csr);
    EXPECT_EQ(refusal_on_host(op), "");
    EXPECT_EQ(op.row_token.device, kGpu);
    EXPECT_EQ(op.row_token.data, p.row_token.data());
  }
}

TEST(HostLists, OnlyListsAreCopied) {
  Lists p;
  std::size_t copied = 0;
  HostLists lists([&](void*, const void*, std::size_t bytes) { copied += bytes; });
  const LayerForward op = lists.of(p.layer(kGpu, false));
  EXPECT_EQ(copied, 4 * (p.offsets.size() + p.row_token.size() + p.row_slot.size() + p.slot_row.size()));
  EXPECT_EQ(op.x.device, kGpu);
  EXPECT_EQ(op.y.device, kGpu);
}

TEST(HostLists, ListsThatCannotBeCopiedAreRefusedUnread) {
  const auto refuse = [](auto&& spoil) {
    Lists p;
    LayerForward op = p.layer(kGpu, false);
    spoil(op);
    HostLists lists([](void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); });
    return refusal(lists.of(op));
  };
  EXPECT_NE(refuse([](LayerForward& op) { op.row_token.dtype = DType::int64; }).find("row_token: expected dtype int32"),
            std::string::npos);
  EXPECT_NE(refuse([](LayerForward& op) { op.slot_row.stride = {1, 3}; }).find("slot_row: expected a contiguous tensor"),
            std::string::npos);
  for (TensorView LayerForward::* list : {&LayerForward::expert_offsets, &LayerForward::row_slot, &LayerForward::slot_row})
    EXPECT_NE(refuse([&](LayerForward& op) { (op.*list).data = nullptr; }).find("got a null pointer"), std::string::npos);
}

}  // namespace
}  // namespace intarsia
