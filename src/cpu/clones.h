// One loop compiled for several instruction sets; the loader picks. Sanitizers run before the loader's choice is safe, and
// other compilers take the attribute on fewer kinds of functions, so those builds use the baseline. GCC ignores it,
// silently, on templates of external linkage.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define INTARSIA_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define INTARSIA_CLONES
#endif
