/* A stand-in for F-Stack: its interface (zapex/fstack/binding.py) over the kernel's sockets.
 *
 * It has F-Stack's habits, which tests/fstack/test_calls.py holds against a real library: blocking
 * calls fail with EPERM, some values are FreeBSD's, time-outs are ignored, descriptors begin at
 * 1024, vectors are changed, ff_run works once, and a call from another thread ends the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FIRST = 1024, MOST = 4096, KNOTES = 2 * MOST, IOVECS = 1024 };
enum { READ = -1, WRITE = -2 };
enum { ADD = 1, DELETE = 2, ENABLE = 4, DISABLE = 8, ONESHOT = 0x10, CLEAR = 0x20, RECEIPT = 0x40,
       ERROR = 0x4000, END = 0x8000 };

struct kevent {
    uint64_t ident;
    int16_t filter;
    uint16_t flags;
    uint32_t fflags;
    int64_t data;
    uint64_t udata;
    uint64_t ext[4];
};

struct file { /* a socket, or a queue (real < 0, used) */
    int used, real, nonblocking, listening, no_port, connected;
    int error; /* taken from the kernel, to be told once more */
};

struct knote {
    int queue, fd, enabled;
    int16_t filter;
    uint16_t flags;
    uint64_t udata;
};

int dpdk_argc;
char *dpdk_argv[17];

static struct file files[MOST];
static struct knote knotes[KNOTES];
static int n_knotes, idle_us, ports_wanted, memory_mib = 64, stopping, has_run, up;
static pthread_t owner;

static void enter(const char *name) {
    if (!up || !pthread_equal(owner, pthread_self())) {
        fprintf(stderr, "stand-in: %s was called %s\n", name,
                up ? "by another thread" : "before the start");
        abort();
    }
}

static int fail(int number) {
    errno = number;
    return -1;
}

static struct file *file_of(int fd) {
    int i = fd - FIRST;
    return i >= 0 && i < MOST && files[i].used ? &files[i] : NULL;
}

/* The error that waits at a socket; it is taken from the kernel, and kept. */
static int error_of(struct file *file) {
    int number = 0;
    socklen_t nbytes = sizeof number;
    if (!getsockopt(file->real, SOL_SOCKET, SO_ERROR, &number, &nbytes) && number)
        file->error = number == EPIPE ? ECONNRESET : number; /* a reset after the peer's end */
    return file->error;
}

static int add_file(int real, int nonblocking) {
    for (int i = 0; i < MOST; i++)
        if (!files[i].used) {
            files[i] = (struct file){.used = 1, .real = real, .nonblocking = nonblocking};
            return FIRST + i;
        }
    close(real);
    return fail(ENFILE);
}

static int freebsd_errno(int number) {
    switch (number) {
    case ECONNREFUSED: return 61;
    case ECONNRESET: return 54;
    case ECONNABORTED: return 53;
    case ETIMEDOUT: return 60;
    case EHOSTUNREACH: return 65;
    case ENETUNREACH: return 51;
    default: return number;
    }
}

/* The start. */

int ff_load_config(int argc, char *const argv[]) {
    char *name = NULL, line[256], port[16];
    int option, lines = 0, known = 0;
    optind = 1;
    while ((option = getopt(argc, argv, "c:t:p:")) != -1)
        if (option == 'c')
            name = optarg;
    FILE *file = name ? fopen(name, "r") : NULL;
    if (!file) {
        printf("failed to open file %s\n", name ? name : "(null)");
        return -1;
    }
    while (fgets(line, sizeof line, file)) {
        lines++;
        if (strchr("#;\n", line[0]) || line[0] == '[' || strchr(line, '=')) {
            sscanf(line, "idle_sleep=%d", &idle_us);
            sscanf(line, "memory=%d", &memory_mib);
            known |= sscanf(line, "addr=%15s", port) == 1;
            if (sscanf(line, "port_list=%15s", port) == 1)
                ports_wanted = atoi(port) + 1;
            continue;
        }
        printf("parse %s failed on line %d\n", name, lines);
        return -1;
    }
    fclose(file);
    if (!known) {
        fprintf(stderr, "port0 if config error: no addr\n");
        return -1;
    }
    dpdk_argv[dpdk_argc++] = "f-stack";
    dpdk_argv[dpdk_argc++] = "--no-huge";
    return 0;
}

static void end(const char *text) {
    fprintf(stderr, "%s\n", text);
    exit(1);
}

int ff_dpdk_init(int argc, char **argv) {
    int ports = 0;
    for (int i = 1; i < argc; i++) {
        ports += strncmp(argv[i], "--vdev=", 7) == 0;
        if (strncmp(argv[i], "--", 2) != 0)
            end("EAL: FATAL: Invalid 'command line' arguments.");
    }
    if (memory_mib > 1 << 20)
        end("EAL: FATAL: Cannot init memory");
    if (ports < ports_wanted)
        end("EAL: Error - exiting with code: 1\n  Cause: No probed ethernet devices");
    return 0;
}

int ff_freebsd_init(void) {
    owner = pthread_self();
    up = 1;
    return 0;
}

int ff_dpdk_if_up(void) {
    enter(__func__);
    return 0;
}

static void rest(void) { /* idle_sleep, for as long as no socket has news */
    struct pollfd all[MOST];
    int n = 0;
    for (int i = 0; i < MOST; i++)
        if (files[i].used && files[i].real >= 0)
            all[n++] = (struct pollfd){.fd = files[i].real, .events = POLLIN};
    struct timespec span = {.tv_nsec = 1000L * idle_us};
    ppoll(all, n, &span, NULL);
}

void ff_run(int (*loop)(void *), void *argument) {
    enter(__func__);
    if (has_run++) {
        fprintf(stderr, "stand-in: a second ff_run\n");
        abort();
    }
    while (!stopping) {
        loop(argument);
        if (idle_us && !stopping)
            rest();
    }
}

void ff_stop_run(void) {
    enter(__func__);
    stopping = 1;
}

/* Sockets. */

#define FILE_OR_FAIL(fd)                                                                           \
    struct file *file = (enter(__func__), file_of(fd));                                            \
    if (!file)                                                                                     \
        return fail(EBADF);                                                                        \
    if (file->real < 0)                                                                            \
    return fail(ENOTSOCK)

/* A call that would wait cannot: F-Stack's sleep fails with EPERM. */
static ssize_t awake(struct file *file, ssize_t result) {
    if (result < 0 && errno == EPIPE && !file->connected)
        return fail(ENOTCONN);
    if (result < 0 && errno == EAGAIN && !file->nonblocking)
        return fail(EPERM);
    return result;
}

int ff_socket(int domain, int type, int protocol) {
    enter(__func__);
    int real = socket(domain, type | SOCK_NONBLOCK | SOCK_CLOEXEC, protocol);
    return real < 0 ? -1 : add_file(real, !!(type & SOCK_NONBLOCK));
}

int ff_bind(int fd, const struct sockaddr *address, socklen_t nbytes) {
    FILE_OR_FAIL(fd);
    file->no_port = !((const struct sockaddr_in *)address)->sin_port;
    return bind(file->real, address, nbytes);
}

int ff_listen(int fd, int backlog) {
    FILE_OR_FAIL(fd);
    if (file->no_port) /* no port is chosen */
        return fail(EINVAL);
    file->listening = 1;
    return listen(file->real, backlog);
}

int ff_accept(int fd, struct sockaddr *address, socklen_t *nbytes) {
    FILE_OR_FAIL(fd);
    struct sockaddr_storage name;
    socklen_t length = sizeof name; /* the caller's length is ignored */
    int real = awake(file, accept4(file->real, (void *)&name, &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (real < 0)
        return -1;
    if (address)
        memcpy(address, &name, length);
    if (nbytes)
        *nbytes = length;
    int made = add_file(real, file->nonblocking);
    if (made >= 0)
        file_of(made)->connected = 1;
    return made;
}

int ff_getsockname(int fd, struct sockaddr *address, socklen_t *nbytes) {
    FILE_OR_FAIL(fd);
    return getsockname(file->real, address, nbytes);
}

int ff_close(int fd) {
    enter(__func__);
    struct file *file = file_of(fd);
    if (!file)
        return fail(EBADF);
    int kept = 0;
    for (int i = 0; i < n_knotes; i++)
        if (knotes[i].fd != fd && knotes[i].queue != fd)
            knotes[kept++] = knotes[i];
    n_knotes = kept;
    if (file->real >= 0)
        close(file->real);
    file->used = 0;
    return 0;
}

/* FreeBSD's flags of recv and send. */
static int linux_flags(int flags) {
    return (flags & 0x1 ? MSG_OOB : 0) | (flags & 0x2 ? MSG_PEEK : 0) |
           (flags & 0x40 ? MSG_WAITALL : 0) | MSG_NOSIGNAL;
}

ssize_t ff_recv(int fd, void *memory, size_t nbytes, int flags) {
    FILE_OR_FAIL(fd);
    int number = file->error;
    file->error = 0;
    if (number)
        return fail(number);
    ssize_t got = recv(file->real, memory, nbytes, linux_flags(flags));
    return flags & 0x80 ? got : awake(file, got);
}

static void advance(struct iovec *vectors, int count, ssize_t nbytes) {
    for (int i = 0; i < count && nbytes > 0; i++) {
        size_t part = vectors[i].iov_len < (size_t)nbytes ? vectors[i].iov_len : (size_t)nbytes;
        vectors[i].iov_base = (char *)vectors[i].iov_base + part;
        vectors[i].iov_len -= part;
        nbytes -= part;
    }
}

ssize_t ff_writev(int fd, struct iovec *vectors, int count) {
    FILE_OR_FAIL(fd);
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
    size_t nbytes = 0;
    for (int i = 0; i < count; i++)
        nbytes += vectors[i].iov_len;
    ssize_t sent = sendmsg(file->real, &message, MSG_NOSIGNAL);
    advance(vectors, count, sent);
    if (sent >= 0 && (size_t)sent < nbytes && !file->nonblocking)
        return fail(EPERM);
    return awake(file, sent);
}

static int refused_option(int level, int name) {
    return (level == SOL_SOCKET && (name == SO_TYPE || name == SO_DOMAIN)) ||
           (level == IPPROTO_TCP &&
            (name == TCP_CORK || name == TCP_QUICKACK || name == TCP_USER_TIMEOUT));
}

int ff_setsockopt(int fd, int level, int name, const void *value, socklen_t nbytes) {
    FILE_OR_FAIL(fd);
    return refused_option(level, name) ? fail(EINVAL)
                                       : setsockopt(file->real, level, name, value, nbytes);
}

/* Queues of events. */

int ff_kqueue(void) {
    enter(__func__);
    return add_file(-1, 0);
}

static int change(int queue, const struct kevent *asked) {
    struct file *file = file_of((int)asked->ident);
    if (!file || asked->ident > INT32_MAX)
        return EBADF;
    if (asked->filter != READ && asked->filter != WRITE)
        return EINVAL;
    int i = 0;
    while (i < n_knotes && !(knotes[i].queue == queue && knotes[i].fd == (int)asked->ident &&
                             knotes[i].filter == asked->filter))
        i++;
    if (i == n_knotes) {
        if (!(asked->flags & ADD))
            return ENOENT;
        knotes[n_knotes++] = (struct knote){queue, (int)asked->ident, 1, asked->filter, 0, 0};
    }
    if (asked->flags & DELETE) {
        knotes[i] = knotes[--n_knotes];
        return 0;
    }
    knotes[i].flags = asked->flags & (ONESHOT | CLEAR);
    knotes[i].udata = asked->udata;
    if (asked->flags & (ADD | ENABLE))
        knotes[i].enabled = 1;
    if (asked->flags & DISABLE)
        knotes[i].enabled = 0;
    return 0;
}

static int look(struct knote *note, struct kevent *found) {
    struct file *file = file_of(note->fd);
    struct pollfd state = {.fd = file->real,
                           .events = note->filter == READ ? POLLIN | POLLRDHUP : POLLOUT};
    if (poll(&state, 1, 0) <= 0)
        return 0;
    *found = (struct kevent){.ident = (uint64_t)note->fd, .filter = note->filter,
                             .flags = note->flags, .udata = note->udata};
    int over = note->filter == READ ? POLLRDHUP | POLLHUP | POLLERR : POLLHUP | POLLERR;
    int waiting = 0;
    if (note->filter == READ && !file->listening && ioctl(file->real, FIONREAD, &waiting) == 0)
        found->data = waiting;
    else if (note->filter == READ)
        found->data = 1;
    else if (ioctl(file->real, TIOCOUTQ, &waiting) == 0) {
        int room = 0;
        socklen_t nbytes = sizeof room;
        getsockopt(file->real, SOL_SOCKET, SO_SNDBUF, &room, &nbytes);
        found->data = room / 2 - waiting;
    }
    if (state.revents & over && !file->listening) {
        found->flags |= END;
        found->fflags = freebsd_errno(error_of(file));
    }
    return 1;
}

int ff_kevent(int queue, const struct kevent *changes, int n_changes, struct kevent *found, int most,
              const void *time_out) { /* the time-out is ignored */
    enter(__func__);
    struct file *file = file_of(queue);
    if (!file || file->real >= 0)
        return fail(EBADF);
    (void)time_out;
    int n = 0;
    for (int i = 0; i < n_changes; i++) {
        int number = change(queue, &changes[i]);
        if (number || changes[i].flags & RECEIPT) {
            if (n == most)
                return fail(number);
            found[n] = changes[i];
            found[n].flags = ERROR;
            found[n++].data = freebsd_errno(number);
        }
    }
    if (n)
        return n;
    static int first; /* taken in turn, so that `most` starves none */
    for (int seen = 0, total = n_knotes; seen < total && n < most; seen++) {
        int i = (first + seen) % total;
        struct knote *note = &knotes[i];
        if (note->queue != queue || !note->enabled || !look(note, &found[n]))
            continue;
        n++;
        if (note->flags & ONESHOT)
            note->enabled = 0;
    }
    first = n_knotes ? (first + 1) % n_knotes : 0;
    return n;
}
