// Symbol visibility: the library is compiled with hidden symbols, what is marked here is its ABI.
#ifndef INTARSIA_EXPORT_H_
#define INTARSIA_EXPORT_H_

#if defined(__GNUC__)
#define INTARSIA_EXPORT __attribute__((visibility("default")))
#else
#define INTARSIA_EXPORT
#endif
#endif
