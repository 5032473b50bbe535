/* Loaded before the C library's own functions (LD_PRELOAD): lets the n-th system call of a folder fail or kill.

   Only calls for files below the armed folder count, so that the interpreter itself goes on undisturbed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define MOST_FILES 4096

static char folder[512];
static atomic_long left;       /* calls until the first that fails; below 0: not armed */
static atomic_long n_failing;  /* how many calls fail from then on; 0: kill the process instead */
static int failure;            /* errno */
static char ours[MOST_FILES];  /* file descriptors below the folder */

void arm(const char *below, long n, long failing, int with)
{
    strncpy(folder, below, sizeof folder - 1);
    failure = with;
    n_failing = failing;
    left = n;
}

/* How many more calls could be made before one failed. */
long disarm(void)
{
    return atomic_exchange(&left, -1);
}

static int below(const char *path)
{
    return folder[0] && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_ours(int fd)
{
    return fd >= 0 && fd < MOST_FILES && ours[fd];
}

/* Whether this call, which is one of the folder's, is to fail. */
static int fails(void)
{
    if (left < 0 || atomic_fetch_sub(&left, 1) > 0) return 0;
    if (n_failing == 0) kill(getpid(), SIGKILL);
    if (atomic_fetch_sub(&n_failing, 1) <= 1) left = -1; /* the last of them */
    else left = 0;
    errno = failure;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opened(int fd, const char *path)
{
    if (fd >= 0 && fd < MOST_FILES) ours[fd] = below(path);
    return fd;
}

#define OPEN(name)                                                                     \
    int name(const char *path, int flags, ...)                                         \
    {                                                                                  \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = va_arg(more, mode_t);                                            \
        va_end(more);                                                                  \
        if (below(path) && fails()) return -1;                                         \
        return opened(REAL(name)(path, flags, mode), path);                            \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                   \
    int name(int at, const char *path, int flags, ...)                                 \
    {                                                                                  \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = va_arg(more, mode_t);                                            \
        va_end(more);                                                                  \
        if (below(path) && fails()) return -1;                                         \
        return opened(REAL(name)(at, path, flags, mode), path);                        \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd)
{
    if (fd >= 0 && fd < MOST_FILES) ours[fd] = 0;
    return REAL(close)(fd);
}

/* A write that is cut off by a kill has written a part. */
ssize_t write(int fd, const void *data, size_t n)
{
    if (is_ours(fd)) {
        if (left == 0 && n_failing == 0 && n > 1) REAL(write)(fd, data, n / 2);
        if (fails()) return -1;
    }
    return REAL(write)(fd, data, n);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at)
{
    if (is_ours(fd)) {
        if (left == 0 && n_failing == 0 && n > 1) REAL(pwrite64)(fd, data, n / 2, at);
        if (fails()) return -1;
    }
    return REAL(pwrite64)(fd, data, n, at);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    return pwrite64(fd, data, n, at);
}

int fsync(int fd)
{
    return is_ours(fd) && fails() ? -1 : REAL(fsync)(fd);
}

int fdatasync(int fd)
{
    return is_ours(fd) && fails() ? -1 : REAL(fdatasync)(fd);
}

int ftruncate(int fd, off_t n)
{
    return is_ours(fd) && fails() ? -1 : REAL(ftruncate)(fd, n);
}

int ftruncate64(int fd, off64_t n)
{
    return is_ours(fd) && fails() ? -1 : REAL(ftruncate64)(fd, n);
}

ssize_t read(int fd, void *data, size_t n)
{
    return is_ours(fd) && fails() ? -1 : REAL(read)(fd, data, n);
}

ssize_t pread64(int fd, void *data, size_t n, off64_t at)
{
    return is_ours(fd) && fails() ? -1 : REAL(pread64)(fd, data, n, at);
}

int unlink(const char *path)
{
    return below(path) && fails() ? -1 : REAL(unlink)(path);
}

int rename(const char *from, const char *to)
{
    return below(from) && fails() ? -1 : REAL(rename)(from, to);
}
