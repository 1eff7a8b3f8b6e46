/* Faults at chosen file-system calls of a process: preloaded (LD_PRELOAD), armed by the process.

Calls on files under one folder are counted. At call number `at` the process is killed, gets a
signal, or the call fails or writes less than asked. Some file systems are simulated: without the
flags of renameat2, or without hard links. Nothing is synced to disk, which would only cost time.
The counters are in shared memory, so that the parent can read them when the process has ended. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define SLOTS 8

enum action { NOTHING, KILL, FAIL, FAIL_FROM_THEN_ON, SHORT, SIGNAL };
enum kind { CHANGE = 1, READ = 2 };
enum system { NO_RENAME_FLAGS = 1, NO_LINKS = 2 };

struct slot {
  long at, count;
  int action, number, kinds, system, refusal;
  char folder[PATH_MAX], where[PATH_MAX + 64];
};

static struct slot *slots, *armed;

__attribute__((constructor)) static void start(void) {
  void *made = mmap(NULL, SLOTS * sizeof(struct slot), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  slots = made == MAP_FAILED ? NULL : made;
}

EXPORT void faults_reset(int slot) { memset(&slots[slot], 0, sizeof *slots); }
EXPORT long faults_count(int slot) { return slots[slot].count; }
EXPORT const char *faults_where(int slot) { return slots[slot].where; }
EXPORT void faults_disarm(void) { armed = NULL; }
EXPORT void faults_arm(int slot, const char *folder, long at, int action, int number, int kinds,
                       int system, int refusal) {
  struct slot *s = &slots[slot];
  snprintf(s->folder, sizeof s->folder, "%s/", folder);
  s->at = at, s->action = action, s->number = number, s->kinds = kinds;
  s->system = system, s->refusal = refusal;
  armed = s;
}

/* Whether a path, relative to an open folder, or the path of an open file is in the folder. */
static int inside(int at, const char *path, char *out) {
  int used = 0;
  if (path == NULL || path[0] != '/') {
    char link[64];
    if (at == AT_FDCWD) strcpy(link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return 0;
    used = (int)n;
    out[used] = 0;
  }
  if (path != NULL)
    snprintf(out + used, (size_t)(PATH_MAX - used), used ? "/%s" : "%s", path);
  return strncmp(out, armed->folder, strlen(armed->folder)) == 0;
}

/* 0: go on; -1: fail with errno; 1: write less than asked. */
static int fault(const char *name, int kind, int at, const char *path, int at2, const char *path2) {
  char full[PATH_MAX];
  if (armed == NULL) return 0;
  int before = errno;
  int counts = (armed->kinds & kind) &&
               (inside(at, path, full) || (path2 != NULL && inside(at2, path2, full)));
  errno = before;
  if (!counts) return 0;
  long number = __atomic_fetch_add(&armed->count, 1, __ATOMIC_SEQ_CST);
  int lasting = armed->action == FAIL_FROM_THEN_ON || armed->action == SHORT;
  if (armed->at < 0 || number < armed->at || (number > armed->at && !lasting)) return 0;
  if (number == armed->at) snprintf(armed->where, sizeof armed->where, "%s %s", name, full);
  switch (armed->action) {
    case KILL:
      kill(getpid(), SIGKILL);
      syscall(SYS_exit_group, 137); /* process 1 of a container does not receive it */
      return 0;
    case SIGNAL:
      kill(getpid(), armed->number);
      return 0;
    case SHORT:
      return 1;
    case NOTHING:
      return 0;
    default:
      /* A full disk can still be read and emptied. */
      if (armed->number == ENOSPC && (kind == READ || strstr(name, "unlink") || !strcmp(name, "rmdir") ||
                                      !strcmp(name, "fsync")))
        return 0;
      errno = armed->number;
      return -1;
  }
}

static int refused(int which) {
  if (armed == NULL || !(armed->system & which)) return 0;
  errno = armed->refusal;
  return 1;
}

#define REAL(type, name, ...)                                                  \
  static type (*real)(__VA_ARGS__);                                            \
  if (real == NULL) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define FAULT(name, at, path) fault(name, CHANGE, at, path, 0, NULL)
#define OPEN_KIND(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT) ? CHANGE : READ)
#define OPEN_NAME(flags) (OPEN_KIND(flags) == CHANGE ? "create" : "open")

#define OPEN(symbol)                                                           \
  EXPORT int symbol(const char *path, int flags, ...) {                        \
    REAL(int, #symbol, const char *, int, ...);                                \
    va_list more;                                                              \
    va_start(more, flags);                                                     \
    mode_t mode = va_arg(more, mode_t);                                        \
    va_end(more);                                                              \
    if (fault(OPEN_NAME(flags), OPEN_KIND(flags), AT_FDCWD, path, 0, NULL) < 0) return -1; \
    return real(path, flags, mode);                                            \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(symbol)                                                         \
  EXPORT int symbol(int at, const char *path, int flags, ...) {                \
    REAL(int, #symbol, int, const char *, int, ...);                           \
    va_list more;                                                              \
    va_start(more, flags);                                                     \
    mode_t mode = va_arg(more, mode_t);                                        \
    va_end(more);                                                              \
    if (fault(OPEN_NAME(flags), OPEN_KIND(flags), at, path, 0, NULL) < 0) return -1;     \
    return real(at, path, flags, mode);                                        \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(symbol)                                                          \
  EXPORT FILE *symbol(const char *path, const char *mode) {                    \
    REAL(FILE *, #symbol, const char *, const char *);                         \
    int kind = strpbrk(mode, "wa+") ? CHANGE : READ;                           \
    if (fault("fopen", kind, AT_FDCWD, path, 0, NULL) < 0) return NULL;        \
    return real(path, mode);                                                   \
  }
FOPEN(fopen)
FOPEN(fopen64)

EXPORT DIR *opendir(const char *path) {
  REAL(DIR *, "opendir", const char *);
  return fault("opendir", READ, AT_FDCWD, path, 0, NULL) < 0 ? NULL : real(path);
}

/* A short count is at least 1: 0 is never returned for a write of more. */
#define PART(size) ((size) > 1 ? (size) / 2 : (size))
#define TRANSFER(symbol, name, kind, fd, size, declared, types, passed)        \
  EXPORT ssize_t symbol declared {                                             \
    REAL(ssize_t, #symbol, types);                                             \
    switch (fault(name, kind, fd, NULL, 0, NULL)) {                            \
      case -1: return -1;                                                      \
      case 1: size = PART(size);                                               \
    }                                                                          \
    return real passed;                                                        \
  }
#define COMMA ,
TRANSFER(write, "write", CHANGE, fd, n, (int fd, const void *data, size_t n),
         int COMMA const void * COMMA size_t, (fd, data, n))
TRANSFER(pwrite, "write", CHANGE, fd, n, (int fd, const void *data, size_t n, off_t at),
         int COMMA const void * COMMA size_t COMMA off_t, (fd, data, n, at))
TRANSFER(pwrite64, "write", CHANGE, fd, n, (int fd, const void *data, size_t n, off64_t at),
         int COMMA const void * COMMA size_t COMMA off64_t, (fd, data, n, at))
TRANSFER(read, "read", READ, fd, n, (int fd, void *data, size_t n),
         int COMMA void * COMMA size_t, (fd, data, n))
TRANSFER(pread, "read", READ, fd, n, (int fd, void *data, size_t n, off_t at),
         int COMMA void * COMMA size_t COMMA off_t, (fd, data, n, at))
TRANSFER(pread64, "read", READ, fd, n, (int fd, void *data, size_t n, off64_t at),
         int COMMA void * COMMA size_t COMMA off64_t, (fd, data, n, at))
TRANSFER(sendfile, "write", CHANGE, out, n, (int out, int in, off_t *at, size_t n),
         int COMMA int COMMA off_t * COMMA size_t, (out, in, at, n))
TRANSFER(sendfile64, "write", CHANGE, out, n, (int out, int in, off64_t *at, size_t n),
         int COMMA int COMMA off64_t * COMMA size_t, (out, in, at, n))
TRANSFER(copy_file_range, "write", CHANGE, out, n,
         (int in, off64_t *from, int out, off64_t *to, size_t n, unsigned flags),
         int COMMA off64_t * COMMA int COMMA off64_t * COMMA size_t COMMA unsigned,
         (in, from, out, to, n, flags))
TRANSFER(writev, "write", CHANGE, fd, n, (int fd, const struct iovec *parts, int n),
         int COMMA const struct iovec * COMMA int, (fd, parts, n))

#define CALL(symbol, name, at, path, declared, types, passed)                  \
  EXPORT int symbol declared {                                                 \
    REAL(int, #symbol, types);                                                 \
    return FAULT(name, at, path) < 0 ? -1 : real passed;                       \
  }
CALL(creat, "create", AT_FDCWD, path, (const char *path, mode_t mode),
     const char * COMMA mode_t, (path, mode))
CALL(unlink, "unlink", AT_FDCWD, path, (const char *path), const char *, (path))
CALL(unlinkat, "unlink", at, path, (int at, const char *path, int flags),
     int COMMA const char * COMMA int, (at, path, flags))
CALL(rmdir, "rmdir", AT_FDCWD, path, (const char *path), const char *, (path))
CALL(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode),
     const char * COMMA mode_t, (path, mode))
CALL(mkdirat, "mkdir", at, path, (int at, const char *path, mode_t mode),
     int COMMA const char * COMMA mode_t, (at, path, mode))
CALL(symlink, "symlink", AT_FDCWD, path, (const char *target, const char *path),
     const char * COMMA const char *, (target, path))
CALL(truncate, "truncate", AT_FDCWD, path, (const char *path, off_t size),
     const char * COMMA off_t, (path, size))
CALL(ftruncate, "truncate", fd, NULL, (int fd, off_t size), int COMMA off_t, (fd, size))
CALL(ftruncate64, "truncate", fd, NULL, (int fd, off64_t size), int COMMA off64_t, (fd, size))
CALL(chmod, "chmod", AT_FDCWD, path, (const char *path, mode_t mode),
     const char * COMMA mode_t, (path, mode))
CALL(fchmod, "chmod", fd, NULL, (int fd, mode_t mode), int COMMA mode_t, (fd, mode))

#define ALLOCATE(symbol, off)                                                  \
  EXPORT int symbol(int fd, off at, off size) {                                \
    REAL(int, #symbol, int, off, off);                                         \
    return FAULT("fallocate", fd, NULL) < 0 ? errno : real(fd, at, size);      \
  }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define SYNC(symbol)                                                           \
  EXPORT int symbol(int fd) { return FAULT("fsync", fd, NULL) < 0 ? -1 : 0; }
SYNC(fsync)
SYNC(fdatasync)

EXPORT int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  return fault("rename", CHANGE, AT_FDCWD, from, AT_FDCWD, to) < 0 ? -1 : real(from, to);
}
EXPORT int renameat(int at, const char *from, int at2, const char *to) {
  REAL(int, "renameat", int, const char *, int, const char *);
  return fault("rename", CHANGE, at, from, at2, to) < 0 ? -1 : real(at, from, at2, to);
}
EXPORT int renameat2(int at, const char *from, int at2, const char *to, unsigned flags) {
  REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
  if (fault("renameat2", CHANGE, at, from, at2, to) < 0) return -1;
  return flags && refused(NO_RENAME_FLAGS) ? -1 : real(at, from, at2, to, flags);
}
EXPORT int link(const char *from, const char *to) {
  REAL(int, "link", const char *, const char *);
  if (fault("link", CHANGE, AT_FDCWD, from, AT_FDCWD, to) < 0) return -1;
  return refused(NO_LINKS) ? -1 : real(from, to);
}
EXPORT int linkat(int at, const char *from, int at2, const char *to, int flags) {
  REAL(int, "linkat", int, const char *, int, const char *, int);
  if (fault("link", CHANGE, at, from, at2, to) < 0) return -1;
  return refused(NO_LINKS) ? -1 : real(at, from, at2, to, flags);
}
