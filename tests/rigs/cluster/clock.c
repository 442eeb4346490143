/* The time of day, moved by as many seconds as the file CLOCK_OFFSET_FILE holds (a long); it may change at any moment. LD_PRELOAD.
   libfaketime moves too much: with it, clock_nanosleep fails now and then, and with it Python's time.sleep. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void)
{
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        offset_s = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (seconds)
        *seconds = precise.tv_sec;
    return precise.tv_sec;
}
