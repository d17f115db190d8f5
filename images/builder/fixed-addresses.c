/* Gives a compiler its memory at the same addresses in every run: LD_PRELOAD=fixed-addresses.so nvcc …
 *
 * cicc of CUDA 13.0 lets the order of its heap decide: of 40 runs over one file of llama.cpp one gave other PTX, and a
 * whole build differed in one kernel of 7,020. Switching the kernel's own randomization off is not allowed in a build.
 * cicc carries an allocator of its own, which asks for memory by mmap and sbrk; everything else is left as it is. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAP_STEP = 1 << 21, BREAK_STEP = 1 << 26 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Far from where Linux puts programs, libraries and stacks. */
static uintptr_t next_map = 0x200000000000, break_at = 0x100000000000, break_end = 0x100000000000;

void *mmap(void *wanted, size_t size, int protection, int flags, int file, off_t offset) {
    if (wanted == NULL) {
        pthread_mutex_lock(&lock);
        wanted = (void *)next_map;
        next_map += (size + MAP_STEP - 1) & ~(uintptr_t)(MAP_STEP - 1);
        pthread_mutex_unlock(&lock);
    }
    return (void *)syscall(SYS_mmap, wanted, size, protection, flags, file, offset);
}

void *mmap64(void *wanted, size_t size, int protection, int flags, int file, off_t offset) {
    return mmap(wanted, size, protection, flags, file, offset);
}

void *sbrk(intptr_t step) {
    pthread_mutex_lock(&lock);
    uintptr_t old = break_at;
    if (break_at + step > break_end) {
        size_t more = (break_at + step - break_end + BREAK_STEP - 1) & ~(uintptr_t)(BREAK_STEP - 1);
        void *here = (void *)break_end;
        long got = syscall(SYS_mmap, here, more, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (got != (long)here) {
            pthread_mutex_unlock(&lock);
            errno = ENOMEM;
            return (void *)-1;
        }
        break_end += more;
    }
    break_at += step;
    pthread_mutex_unlock(&lock);
    return (void *)old;
}
