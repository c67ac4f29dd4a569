/* A slow disk for one process: gcc -shared -fPIC -o slow_disk.so slow_disk.c -ldl; LD_PRELOAD=slow_disk.so SLOW_DISK_MS=50.

   Each sync takes SLOW_DISK_MS longer, and so does each positioned read that finds something not in the page cache. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void wait_for_the_disk(void) {
    static long ms = -1;
    if (ms < 0) ms = getenv("SLOW_DISK_MS") ? atol(getenv("SLOW_DISK_MS")) : 0;
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

static int sync_by(const char *name, int fd) {
    wait_for_the_disk();
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}

int fsync(int fd) { return sync_by("fsync", fd); }
int fdatasync(int fd) { return sync_by("fdatasync", fd); }

static ssize_t read_by(const char *name, int fd, void *buffer, size_t count, off64_t offset) {
    struct iovec part = {buffer, count};
    ssize_t cached = preadv2(fd, &part, 1, offset, RWF_NOWAIT);
    if (cached == 0 || cached == (ssize_t)count) return cached;
    if (cached > 0 || errno == EAGAIN) wait_for_the_disk();
    return ((ssize_t (*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, name))(fd, buffer, count, offset);
}

ssize_t pread(int fd, void *buffer, size_t count, off_t offset) { return read_by("pread", fd, buffer, count, offset); }
ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset) { return read_by("pread64", fd, buffer, count, offset); }
