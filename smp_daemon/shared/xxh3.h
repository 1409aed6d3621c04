/* The functions of the xxHash library that digest bytes piece by piece, in the order in which `smp_daemon.shared.xxh3`
 * gives their addresses: XXH3_createState, XXH3_64bits_reset, _update, _digest and XXH3_freeState. */
#ifndef HOLDFAST_XXH3_H
#define HOLDFAST_XXH3_H

#include <stddef.h>

struct hash {
    void *(*create)(void);
    int (*reset)(void *state);
    int (*update)(void *state, const void *bytes, size_t count);
    unsigned long long (*digest)(const void *state);
    int (*destroy)(void *state);
};

#endif
