// A driver of CUDA for a device that does not exist: the functions that holdfast calls, and those that its tests need to
// stand in for torch. Built as libcuda.so.1, so that holdfast's own calls arrive here.
//
// One thread is the device. It does the work of all streams, one piece at a time, each after a delay that a seed draws:
// in the order of each stream, and else in an order that is drawn, or prefers kernels or copies. A kernel also waits for
// those before it in its hardware queue, whatever their streams; copies do not. A long copy is done in two halves, with
// other work in between. Memory of the device is the host's, so kernels are functions of the caller. Allocations follow
// each other without gaps, and no copy may go beyond the one in which it begins.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_CONTEXT = 201, HANDLE = 400, NOT_FOUND = 500,
       NOT_READY = 600, ILLEGAL = 700, REGISTERED = 712, UNREGISTERED = 713, CAPTURING = 900, INVALIDATED = 901, ISOLATION = 905, UNKNOWN = 999 };
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum { KERNEL, COPY, RECORD, WAIT, HOLD };
enum { DRAWN = 0, KERNELS_FIRST = 1, COPIES_FIRST = 2 };
enum { DEVICE_MEMORY, PINNED, PAGES };
enum { MOST = 4096, MOST_QUEUES = 32 };

typedef void (*Function)(uint64_t);
typedef struct Event { long recorded, passed; int captured, device; } Event;
typedef struct Op {
    int kind, half;
    struct Op *next;    // of its stream, or graph
    struct Op *behind;  // of its hardware queue
    Function function;
    uint64_t argument;
    char *target; const char *source; size_t count;
    Event *event; long number;
} Op;
typedef struct Graph { Op *first, *last; int invalid, mode; pthread_t owner; } Graph;
typedef struct Stream { Op *first, *last; Graph *graph; int queue, device; } Stream;
typedef struct { uint64_t start, count; int kind; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams[MOST];
static int stream_count, queue_count = 8, order, stuck, running, sticky, sees_host = 1;
static Op *queue_first[MOST_QUEUES], *queue_last[MOST_QUEUES];
static Range ranges[1 << 16];
static int range_count;
static uint64_t state = 1, memory_left = UINT64_MAX, pinned_left = UINT64_MAX;
static unsigned longest_us;
static long copies, fail_copy, registrations, refuse_from, waited_kernels;
static Graph *capturing[MOST];
static int capture_count;
static __thread int bound = -1, mode = GLOBAL;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return below ? (uint32_t)(state >> 33) % below : 0;
}

static Range *range_of(uint64_t place, uint64_t count) {
    for (int i = 0; i < range_count; i++)
        if (ranges[i].start <= place && place + count <= ranges[i].start + ranges[i].count) return &ranges[i];
    return NULL;
}

static int add_range(uint64_t start, uint64_t count, int kind) {
    if (range_count == 1 << 16) return NO_MEMORY;
    ranges[range_count++] = (Range){start, count, kind};
    return OK;
}

static int remove_range(uint64_t start, int kind) {
    for (int i = 0; i < range_count; i++)
        if (ranges[i].start == start && ranges[i].kind == kind) {
            ranges[i] = ranges[--range_count];
            return OK;
        }
    return kind == PAGES ? UNREGISTERED : INVALID;
}

// ---------------------------------------------------------------- the device

static long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int is_ready(Stream *stream) {
    Op *op = stream->first;
    if (!op) return 0;
    if (op->kind == WAIT) return op->event->passed >= op->number;
    if (op->kind == HOLD) {
        if (!op->number) op->number = now_us() + (long)op->argument;
        return sticky || now_us() >= op->number;
    }
    return op->kind != KERNEL || queue_first[stream->queue] == op;
}

static void pop(Stream *stream) {
    Op *op = stream->first;
    stream->first = op->next;
    if (!stream->first) stream->last = NULL;
    if (op->kind == KERNEL) {
        queue_first[stream->queue] = op->behind;
        if (!op->behind) queue_last[stream->queue] = NULL;
    }
    free(op);
}

static Stream *choose(void) {
    Stream *ready[MOST], *liked[MOST];
    int count = 0, likes = 0, like = order == KERNELS_FIRST ? KERNEL : COPY;
    for (int i = 0; i < stream_count; i++)
        if (is_ready(streams[i])) ready[count++] = streams[i];
    if (!count) return NULL;
    for (int i = 0; i < count; i++)
        if (order != DRAWN && (ready[i]->first->kind == like || ready[i]->first->kind >= RECORD)) liked[likes++] = ready[i];
    return likes ? liked[draw(likes)] : ready[draw(count)];
}

static int copy_part(Op *op) {  // whether the copy is complete
    size_t half = op->count > 64 ? op->count / 2 : op->count, begin = op->half ? half : 0;
    memcpy(op->target + begin, op->source + begin, op->half ? op->count - half : half);
    return op->half++ || half == op->count;
}

static void *device(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        Stream *stream = stuck ? NULL : choose();
        if (!stream) {
            long until = now_us() + 1000;
            struct timespec soon = {until / 1000000, until % 1000000 * 1000};
            pthread_cond_timedwait(&changed, &lock, &soon);
            continue;
        }
        Op *op = stream->first;
        unsigned delay = op->kind <= COPY ? draw(longest_us + 1) : 0;
        if (delay || op->kind == KERNEL) {
            running = 1;
            pthread_mutex_unlock(&lock);
            if (delay) usleep(delay);
            if (op->kind == KERNEL && !sticky) op->function(op->argument);
            pthread_mutex_lock(&lock);
            running = 0;
        }
        if (op->kind == RECORD && op->event->passed < op->number) op->event->passed = op->number;
        if (op->kind == COPY && !sticky) {
            copies += !op->half;
            Range *to = range_of((uint64_t)op->target, op->count), *from = range_of((uint64_t)op->source, op->count);
            if ((!sees_host && ((to && to->kind == PAGES) || (from && from->kind == PAGES))) || copies == fail_copy) {
                sticky = ILLEGAL;
            } else if (!copy_part(op)) {
                continue;
            }
        }
        pop(stream);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pid_t process;
static void start(void) {
    process = getpid();
    pthread_t thread;
    pthread_create(&thread, NULL, device, NULL);
}

// ---------------------------------------------------------------- captures

static int unsafe(void) {  // called with the lock: what CUDA forbids during a capture
    int found = OK;
    for (int i = 0; i < capture_count; i++) {
        Graph *graph = capturing[i];
        int mine = pthread_equal(graph->owner, pthread_self());
        int forbidden = mode == GLOBAL ? (mine ? graph->mode != RELAXED : graph->mode == GLOBAL)
                                       : mode == THREAD_LOCAL && mine && graph->mode != RELAXED;
        if (forbidden) graph->invalid = 1, found = CAPTURING;
    }
    return found ? found : sticky;
}

static int enter(int needs_context) {
    pthread_once(&once, start);
    if (process != getpid()) {  // a fork has no device, and the lock may be held for good
        fprintf(stderr, "a forked process calls the driver\n");
        _exit(NOT_INITIALIZED);
    }
    pthread_mutex_lock(&lock);
    return sticky ? sticky : needs_context && bound < 0 ? NO_CONTEXT : OK;
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

static Stream *at(void *handle) { return handle ? handle : streams[bound < 0 ? 0 : bound]; }

static int enter_at(void *handle) {  // as `enter`, for work on a stream: it must be of the current context
    int code = enter(1);
    return code || at(handle)->device == bound ? code : HANDLE;
}

static int put(Stream *stream, Op wanted) {  // called with the lock
    Op *op = malloc(sizeof wanted);
    *op = wanted;
    op->next = op->behind = NULL;
    Graph *graph = stream->graph;
    Op **first = graph ? &graph->first : &stream->first, **last = graph ? &graph->last : &stream->last;
    if (*last) (*last)->next = op; else *first = op;
    *last = op;
    if (!graph && op->kind == KERNEL) {
        Op *before = queue_last[stream->queue];
        if (before) before->behind = op; else queue_first[stream->queue] = op;
        queue_last[stream->queue] = op;
    }
    pthread_cond_broadcast(&changed);
    return OK;
}

// ---------------------------------------------------------------- what the driver has

int cuInit(unsigned flags) { (void)flags; return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGet(int *found, int number) { *found = number; return OK; }

int cuDeviceGetAttribute(int *found, int attribute, int number) {
    (void)number;
    *found = attribute == 91 ? sees_host : 1;
    return OK;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == NO_MEMORY ? "out of memory" : code == NO_CONTEXT ? "invalid device context"
        : code == HANDLE ? "invalid resource handle" : code == ILLEGAL ? "an illegal memory access was encountered"
        : code == CAPTURING ? "operation not permitted when stream is capturing"
        : code == INVALIDATED ? "operation failed due to a previous error during capture" : "an error";
    return OK;
}

int cuThreadExchangeStreamCaptureMode(int *wanted) {
    int before = mode;
    mode = *wanted;
    *wanted = before;
    return OK;
}

int cuStreamCreateWithPriority(void **found, unsigned flags, int priority) {
    (void)flags, (void)priority;
    int code = enter(1);
    if (code) return leave(code);
    Stream *made = calloc(1, sizeof *made);
    made->queue = stream_count % queue_count;
    made->device = bound;
    streams[stream_count++] = made;
    *found = made;
    return leave(OK);
}

static int copy(void *target, const void *source, size_t count, void *handle) {  // called with the lock
    if (!range_of((uint64_t)target, count) || !range_of((uint64_t)source, count)) return INVALID;
    return put(at(handle), (Op){.kind = COPY, .target = target, .source = source, .count = count});
}

int cuMemcpyAsync(void *target, const void *source, size_t count, void *handle) {
    int code = enter_at(handle);
    return leave(code ? code : copy(target, source, count, handle));
}

static int batch(void **targets, void **sources, size_t *counts, size_t count, void *attributes, size_t *indices,
                 size_t attribute_count, size_t *failed, void *handle) {
    (void)indices;
    int code = enter_at(handle);
    if (!code && (!handle || attribute_count != 1 || *(int *)attributes != 1 || !count)) code = INVALID;
    for (size_t i = 0; !code && i < count; i++) {
        *failed = i;
        code = copy(targets[i], sources[i], counts[i], handle);
    }
    return leave(code);
}

static int launch(Stream *stream, Function function, uint64_t argument) {  // called with the lock
    for (Op *op = stream->first; op; op = op->next) if (op->kind == COPY) { waited_kernels++; break; }
    return put(stream, (Op){.kind = KERNEL, .function = function, .argument = argument});
}

static void clear_byte(uint64_t target) { *(char *)target = 0; }

int cuMemsetD8Async(uint64_t target, unsigned char value, size_t count, void *handle) {
    int code = enter_at(handle);
    if (!code && (value || count != 1 || !range_of(target, 1))) code = INVALID;
    return leave(code ? code : launch(at(handle), clear_byte, target));
}

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)flags;
    *found = !strcmp(name, "cuMemcpyBatchAsync") && version == 12080 ? (void *)batch : NULL;
    *status = *found ? 0 : 1;
    return OK;
}

// ---------------------------------------------------------------- what torch calls in the driver

int cuCtxSetCurrent(int number) { bound = number; return OK; }
int cuCtxGetDevice(int *number) { *number = bound; return bound < 0 ? NO_CONTEXT : OK; }

int cuEventCreate(void **found, unsigned flags) {
    (void)flags;
    Event *made = *found = calloc(1, sizeof(Event));
    made->device = bound;
    return OK;
}

int cuEventRecord(Event *event, void *handle) {
    int code = enter_at(handle);
    if (!code && event->device != bound) code = HANDLE;
    if (code) return leave(code);
    Stream *stream = at(handle);
    event->captured = stream->graph != NULL;
    return leave(put(stream, (Op){.kind = RECORD, .event = event, .number = ++event->recorded}));
}

int cuStreamWaitEvent(void *handle, Event *event, unsigned flags) {
    (void)flags;
    int code = enter_at(handle);
    Stream *stream = at(handle);
    if (!code && event->captured != (stream->graph != NULL)) {
        if (stream->graph) stream->graph->invalid = 1;
        code = ISOLATION;
    }
    return leave(code ? code : put(stream, (Op){.kind = WAIT, .event = event, .number = event->recorded}));
}

int cuEventQuery(Event *event) {
    int code = enter(1);
    if (!code) code = unsafe();
    return leave(code ? code : event->passed >= event->recorded ? OK : NOT_READY);
}

int cuCtxSynchronize(void) {
    int code = enter(1);
    if (!code) code = unsafe();
    while (!code) {
        int busy = running;
        for (int i = 0; i < stream_count; i++) busy |= streams[i]->first != NULL;
        if (!busy) break;
        pthread_cond_wait(&changed, &lock);
        code = sticky;
    }
    return leave(code);
}

static char *carve(size_t count) {  // called with the lock: memory that is never given back
    static char *next, *end;
    count = (count + 4095) / 4096 * 4096;
    if ((size_t)(end - next) < count) {
        size_t whole = count > 1ul << 30 ? count : 1ul << 30;
        next = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        end = next + whole;
    }
    char *found = next;
    next += count;
    return found;
}

static int allocate(void **found, size_t count, int kind) {
    int code = enter(1);
    if (!code) code = unsafe();
    uint64_t *left = kind == DEVICE_MEMORY ? &memory_left : &pinned_left;
    if (!code && count > *left) code = NO_MEMORY;
    if (code) return leave(code);
    *found = carve(count);
    memset(*found, 0xdd, count);
    if (*left != UINT64_MAX) *left -= count;
    return leave(add_range((uint64_t)*found, count, kind));
}

int cuMemAlloc_v2(void **found, size_t count) { return allocate(found, count, DEVICE_MEMORY); }
int cuMemHostAlloc(void **found, size_t count, unsigned flags) { (void)flags; return allocate(found, count, PINNED); }

int cuMemGetAddressRange_v2(uint64_t *start, size_t *count, uint64_t place) {
    int code = enter(1);
    Range *range = code ? NULL : range_of(place, 1);
    if (range && range->kind == DEVICE_MEMORY) *start = range->start, *count = range->count;
    return leave(code ? code : range && range->kind == DEVICE_MEMORY ? OK : NOT_FOUND);
}

static int is_mapped(void *place, size_t count) {
    unsigned char *resident = malloc(count / 4096 + 1);
    int code = mincore(place, count, resident);
    free(resident);
    return !code;
}

int cuMemHostRegister_v2(void *place, size_t count, unsigned flags) {
    int code = enter(1);
    if (!code) code = unsafe();
    if (code) return leave(code);
    for (int i = 0; i < range_count; i++)
        if ((uint64_t)place < ranges[i].start + ranges[i].count && ranges[i].start < (uint64_t)place + count)
            return leave(REGISTERED);
    if (flags != 1 || !is_mapped(place, count)) return leave(INVALID);
    if (++registrations >= refuse_from) return leave(NO_MEMORY);
    return leave(add_range((uint64_t)place, count, PAGES));
}

int cuMemHostUnregister(void *place) {
    int code = enter(1);
    if (!code) code = unsafe();
    return leave(code ? code : remove_range((uint64_t)place, PAGES));
}

int cuStreamBeginCapture_v2(void *handle, int wanted) {
    int code = enter(1);
    if (code) return leave(code);
    Graph *made = calloc(1, sizeof *made);
    made->mode = wanted;
    made->owner = pthread_self();
    at(handle)->graph = capturing[capture_count++] = made;
    return leave(OK);
}

int cuStreamEndCapture(void *handle, void **found) {
    int code = enter(1);
    if (code) return leave(code);
    Graph *graph = at(handle)->graph;
    at(handle)->graph = NULL;
    for (int i = 0; i < capture_count; i++)
        if (capturing[i] == graph) capturing[i--] = capturing[--capture_count];
    *found = graph;
    return leave(graph->invalid ? INVALIDATED : OK);
}

int cuStreamIsCapturing(void *handle, int *found) {
    int code = enter(0);
    *found = at(handle)->graph != NULL;
    return leave(code);
}

int cuGraphLaunch(Graph *graph, void *handle) {
    int code = enter(1);
    for (Op *op = graph->first; !code && op; op = op->next) code = put(at(handle), *op);
    return leave(code);
}

// ---------------------------------------------------------------- what only tests call

// Queue a kernel: `function(argument)`. If a copy is before it in its stream, its hardware queue waits for that copy.
int testLaunch(void *handle, Function function, uint64_t argument) {
    int code = enter_at(handle);
    return leave(code ? code : launch(at(handle), function, argument));
}

// Let a stream rest for so many microseconds before its next work.
int testHold(void *handle, uint64_t us) {
    int code = enter(1);
    return leave(code ? code : put(at(handle), (Op){.kind = HOLD, .argument = us}));
}

// Begin anew, with a default stream for each of `devices`. Work that is still queued is skipped.
void testReset(uint64_t seed, int wanted, int queues, unsigned delay_us, int devices, void **defaults) {
    enter(0);
    sticky = ILLEGAL, stuck = 0;
    pthread_cond_broadcast(&changed);
    for (int busy = 1; busy;) {
        busy = running;
        for (int i = 0; i < stream_count; i++) busy |= streams[i]->first != NULL;
        if (busy) pthread_cond_wait(&changed, &lock);
    }
    sticky = stream_count = range_count = capture_count = 0;
    copies = fail_copy = registrations = waited_kernels = 0;
    refuse_from = INT64_MAX, sees_host = 1, memory_left = pinned_left = UINT64_MAX;
    state = seed * 2 + 1, order = wanted, queue_count = queues, longest_us = delay_us;
    for (int i = 0; i < devices; i++) {
        Stream *made = calloc(1, sizeof *made);
        made->queue = i % queue_count;
        made->device = i;
        streams[stream_count++] = made;
        defaults[i] = made;
    }
    leave(OK);
}

void testSet(const char *name, int64_t value) {
    enter(0);
    if (!strcmp(name, "fail_copy")) fail_copy = copies + value;
    if (!strcmp(name, "refuse_from")) refuse_from = value;
    if (!strcmp(name, "sees_host")) sees_host = (int)value;
    if (!strcmp(name, "memory_left")) memory_left = (uint64_t)value;
    if (!strcmp(name, "pinned_left")) pinned_left = (uint64_t)value;
    if (!strcmp(name, "stuck")) stuck = (int)value;
    pthread_cond_broadcast(&changed);
    leave(OK);
}

long testGet(const char *name) {
    enter(0);
    long found = !strcmp(name, "copies") ? copies : !strcmp(name, "waited_kernels") ? waited_kernels
        : !strcmp(name, "sticky") ? sticky : !strcmp(name, "registered") ? 0 : -1;
    if (!strcmp(name, "registered"))
        for (int i = 0; i < range_count; i++) found += ranges[i].kind == PAGES;
    leave(OK);
    return found;
}

int testUnsafe(void) {
    enter(0);
    return leave(unsafe());
}
