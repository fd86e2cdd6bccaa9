/* Moves the wall clock that Python sees, by LD_PRELOAD: by the seconds that the file WALL_CLOCK_OFFSET says, an
   int64 that is mapped. Other clocks, and those of other libraries in the process, stay as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static const volatile int64_t *offset;
static void *python;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
    const char *file = getenv("WALL_CLOCK_OFFSET");
    void *known = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    int fd = file != NULL ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    Dl_info info;
    if (fd >= 0 && known != NULL && dladdr(known, &info) != 0) {
        void *at = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
        if (at != MAP_FAILED) {
            offset = at;
            python = info.dli_fbase;
        }
    }
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (real == NULL)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    Dl_info info;
    if (!failed && clock == CLOCK_REALTIME && offset != NULL && *offset != 0
        && dladdr(__builtin_return_address(0), &info) != 0 && info.dli_fbase == python)
        now->tv_sec += *offset;
    return failed;
}
