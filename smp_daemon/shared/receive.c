/* Receives raw bytes from a connected socket and digests them as they arrive.
 *
 * A later digest would read from memory what the kernel has just written through the cache; here it reads the cache.
 * One call receives a whole unit, so the GIL stays free until the unit is there.
 */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/socket.h>
#include <time.h>

#include "xxh3.h"

static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static long long fill(int fd, char *target, size_t bytes, size_t piece, long long limit_ms, const struct hash *hash,
                      void *state) {
    size_t done = 0;
    while (done < bytes) {
        size_t most = bytes - done < piece ? bytes - done : piece;
        ssize_t count = recv(fd, target + done, most, MSG_DONTWAIT);
        if (count > 0) {
            hash->update(state, target + done, (size_t)count);
            done += (size_t)count;
        } else if (count == 0) {
            break;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            struct pollfd ready = {.fd = fd, .events = POLLIN};
            long long left_ms = limit_ms - now_ms();
            int found = left_ms > 0 ? poll(&ready, 1, (int)left_ms) : 0;
            if (found == 0) return -ETIMEDOUT;
            if (found < 0 && errno != EINTR) return -errno;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return (long long)done;
}

/* Returns how many bytes arrived, fewer than `bytes` if the other side closed the connection; or a negative errno,
 * ETIMEDOUT if not all arrived within `timeout_ms`. Writes their xxh3-64 to `digest`. */
long long holdfast_receive(int fd, char *target, size_t bytes, size_t piece, int timeout_ms, const struct hash *hash,
                           unsigned long long *digest) {
    void *state = hash->create();
    long long done = -ENOMEM;
    if (state == NULL) return done;
    hash->reset(state);
    done = fill(fd, target, bytes, piece, now_ms() + timeout_ms, hash, state);
    *digest = hash->digest(state);
    hash->destroy(state);
    return done;
}
