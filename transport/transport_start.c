#include "transport/transport.h"

#include <grpc/grpc.h>
#include <malloc.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

/* gRPC takes a fresh block for each read, and glibc gives large ones back to the kernel at once, so
 * that every byte of a bulk stream would be page-faulted again: 125 k faults for 4 GB, 14 k with
 * these, and half the throughput. */
static void keep_freed_memory(void)
{
    mallopt(M_MMAP_THRESHOLD, 256 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_TOP_PAD, 64 << 20);
}

/* gRPC's listener stops for good at the first accept that finds no free descriptor, so the soft
 * limit, often 1,024, must not be what idle connections run into. */
static void allow_many_files(void)
{
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files); /* the old limit stays: no reason not to serve */
    }
}

void transport_start(void)
{
    sigset_t all, before;

    keep_freed_memory();
    allow_many_files();
    /* The library writes a line to stderr for each failure, which a peer can make happen at will.
     * What matters comes back as a status; GRPC_VERBOSITY=ERROR or INFO in the environment shows
     * the rest. */
    setenv("GRPC_VERBOSITY", "NONE", 0);
    /* gRPC's threads inherit the mask. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    grpc_init();
    sigaddset(&before, SIGPIPE);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void transport_stop(void)
{
    grpc_shutdown();
}
