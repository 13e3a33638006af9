/* What a process holds of malloc's memory, now and at most: preloaded, read with ctypes.
 *
 * With PYTHONMALLOC=malloc every object of Python and every array of NumPy comes by here. Counted is
 * what malloc gave (malloc_usable_size), so nothing needs a table. One thread only is counted right.
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <stddef.h>
#include <errno.h>

long zapex_bytes_now = 0, zapex_bytes_peak = 0;

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static void *counted(void *p) {
    if (p) {
        zapex_bytes_now += malloc_usable_size(p);
        if (zapex_bytes_now > zapex_bytes_peak) zapex_bytes_peak = zapex_bytes_now;
    }
    return p;
}

void *malloc(size_t n) { return counted(__libc_malloc(n)); }
void *calloc(size_t n, size_t m) { return counted(__libc_calloc(n, m)); }
void *memalign(size_t a, size_t n) { return counted(__libc_memalign(a, n)); }
void *aligned_alloc(size_t a, size_t n) { return counted(__libc_memalign(a, n)); }

int posix_memalign(void **out, size_t a, size_t n) {
    void *p = counted(__libc_memalign(a, n));
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

void free(void *p) {
    if (p) zapex_bytes_now -= malloc_usable_size(p);
    __libc_free(p);
}

void *realloc(void *p, size_t n) {
    size_t before = p ? malloc_usable_size(p) : 0;
    void *q = __libc_realloc(p, n);
    if (!q && n) return q;
    zapex_bytes_now -= before;
    return counted(q);
}
