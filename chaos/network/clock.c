/* A wall clock that can be set for some processes alone: preloaded, it adds what a mapped file of 8 bytes says, in
 * seconds, wherever the real-time clock is read, and takes it away again from deadlines by that clock. Monotonic clocks
 * are left alone. One wait that is under way when the clock is set goes on as it began. Timers of the kernel's
 * (timerfd, timer_settime) and what the kernel itself stamps, such as files, are this machine's.
 *
 * Nothing is locked and nothing is shared but those 8 bytes, so a process may be killed anywhere.
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

/* Follow another clock from now on. 0, or an errno. Call while there is one thread. */
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

/* The real function behind one of those below. */
#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real && !(real = (__typeof__(&name))dlsym(RTLD_NEXT, #name))) \
        abort()

/* A deadline by the wall clock that follows the file, as the kernel is to see it. */
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

/* A condition may wait by the monotonic clock, which only its attributes say: such times are no more than the seconds
 * that the machine has been up. */
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

/* Abseil, and gRPC with it, waits on futexes by itself. */
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
