/* A wall clock that can be set for single processes. When preloaded, it adds an offset in seconds, from a mapped file
 * of 8 bytes, wherever the real-time clock is read, and subtracts it from deadlines on that clock. Monotonic clocks are
 * left alone. A wait that has begun before the clock is set keeps its deadline. Kernel timers (timerfd, timer_settime)
 * and timestamps that the kernel sets, such as those of files, use this machine's clock.
 *
 * Nothing is locked, and nothing but those 8 bytes is shared, so a process may be killed anywhere.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t nobody = 0;
static const volatile int64_t *ahead = &nobody;

/* Follow another clock from now on. Returns 0 or an errno. Call while there is one thread. */
int holdfast_follow_clock(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    void *mapped = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    int problem = mapped == MAP_FAILED ? errno : 0;
    close(fd);
    if (!problem)
        ahead = mapped;
    return problem;
}

static void __attribute__((constructor)) begin(void)
{
    const char *path = getenv("HOLDFAST_CLOCK");
    if (path && holdfast_follow_clock(path))
        abort();
}

static int is_wall(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

/* Look up `real`, the function that one of those below replaces. */
#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real && !(real = (__typeof__(&name))dlsym(RTLD_NEXT, #name))) \
        abort()

/* Convert a deadline from the settable clock to the kernel's clock, as `moved`. */
#define DEADLINE(given) \
    struct timespec moved = *(given); \
    moved.tv_sec -= *ahead; \
    if (moved.tv_sec < 0) \
        moved.tv_sec = 0

int clock_gettime(clockid_t clock, struct timespec *now)
{
    REAL(clock_gettime);
    int status = real(clock, now);
    if (!status && is_wall(clock))
        now->tv_sec += *ahead;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    REAL(gettimeofday);
    int status = real(now, zone);
    if (!status)
        now->tv_sec += *ahead;
    return status;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base)
{
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}

/* A condition may wait on the monotonic clock, which only its attributes tell. A deadline below this number of seconds
 * counts as monotonic, since monotonic times do not exceed the machine's uptime. */
#define UPTIME_S 1000000000

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real && !(real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2")) &&
        !(real = dlsym(RTLD_NEXT, "pthread_cond_timedwait")))
        abort();
    if (until->tv_sec < UPTIME_S)
        return real(cond, mutex, until);
    DEADLINE(until);
    return real(cond, mutex, &moved);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until)
{
    REAL(pthread_cond_clockwait);
    if (!is_wall(clock))
        return real(cond, mutex, clock, until);
    DEADLINE(until);
    return real(cond, mutex, clock, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until)
{
    REAL(pthread_mutex_timedlock);
    DEADLINE(until);
    return real(mutex, &moved);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until)
{
    REAL(sem_timedwait);
    DEADLINE(until);
    return real(sem, &moved);
}

int sem_clockwait(sem_t *sem, clockid_t clock, const struct timespec *until)
{
    REAL(sem_clockwait);
    if (!is_wall(clock))
        return real(sem, clock, until);
    DEADLINE(until);
    return real(sem, clock, &moved);
}

/* Abseil, and so gRPC, waits on futexes through this function. */
long syscall(long number, ...)
{
    REAL(syscall);
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
        DEADLINE((const struct timespec *)a[3]);
        return real(number, a[0], a[1], a[2], (long)&moved, a[4], a[5]);
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
