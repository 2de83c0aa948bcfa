/* A load generator that costs little and believes nothing.
 *
 * One thread, one epoll set, keep-alive connections in a closed loop: each sends its next request when the answer to
 * the last one is complete. Bounded in requests, in seconds and by a hard limit. Every answer is checked to its end:
 * status, framing, and for streams that the body ended with `data: [DONE]` and its last chunk, no error event among
 * the others. What ends otherwise is counted by how it ended, never as an answer.
 *
 *   load --port P --body FILE [--path /v1/chat/completions] [--header 'Name: value']... [--connections N]
 *        [--requests R] [--seconds S] [--each E] [--first F] [--limit-s L] [--stream] [--latencies FILE] [--hold]
 *
 * --requests    how many in all; --each: how many on each connection, which then rests
 * --first       number of the first request, for bodies that vary (default 1)
 * --stream      answers are event streams
 * --seconds     no request begins after this; the ones under way are read to the end
 * --limit-s     everything stops here; what is unfinished is counted as such (default 120)
 * --latencies   microseconds of every good answer, as 32-bit unsigned numbers of this machine
 * --hold        when done, print the result, keep the connections open and wait for the end of standard input
 *
 * A run of ten or more `%` in the body is replaced by a number that differs in each request, so that no two prompts
 * are alike (the number is written into the one shared request, so a request that the kernel takes in two pieces may
 * carry two halves of numbers: still a whole request). Prints one JSON object. Exit status 0: the run took place (its errors are figures); 2: wrong usage.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_BYTES = 16 << 10, LINE_BYTES = 24, MAX_CONNECTING = 64, MAX_CONNECT_FAILED = 1000 };
enum state { CLOSED, CONNECTING, SENDING, HEAD, SIZED, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, TO_CLOSE, RESTING };

struct conn {
    int fd, wants_out, status, closes, done, failed;
    long sent_requests;
    enum state state;
    size_t sent;
    int64_t began_us;
    size_t left;                             /* bytes of the sized body or the chunk still to come */
    int digits, trailer_len;
    char line[LINE_BYTES]; int line_len;     /* the beginning of the current event line */
    long events;
    size_t head_len; char head[HEAD_BYTES];
};

static struct {
    long started, answers, streams, events, body_bytes, opened, open, peak_open, streaming, peak_streaming;
    long connect_failed, closed, bad_framing, no_done, error_events, unfinished, bad_status;
    long statuses[600];
} count;

static int poller, streams, hold, port, connecting;
static long max_requests = -1, max_each = -1, first_number = 1, resting, closed;
static struct conn **reopen;                 /* connections that closed, to be opened again while requests remain */
static char *request; static size_t request_len;
static char *mark; static int mark_len;      /* where the varying number goes, inside `request` */
static uint32_t *latencies; static size_t latencies_cap;
static int64_t stop_us, last_answer_us;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void *grow(void *block, size_t bytes) {
    void *fresh = realloc(block, bytes);
    if (!fresh) { perror("realloc"); exit(1); }
    return fresh;
}

static void watch(struct conn *c, int wants_out) {
    if (c->wants_out == wants_out) return;
    c->wants_out = wants_out;
    struct epoll_event e = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

static int some_remain(void) {
    return (max_requests < 0 || count.started < max_requests) && now_us() < stop_us;
}

static int may_begin(const struct conn *c) {
    return some_remain() && (max_each < 0 || c->sent_requests < max_each);
}

static void close_conn(struct conn *c) {
    if (c->state == CLOSED) return;
    if (c->state == CONNECTING) connecting--;
    if (c->state == RESTING) resting--;
    close(c->fd);
    count.open--;
    c->state = CLOSED;
    reopen[closed++] = c;
}

/* The request under way ended badly. */
static void fail(struct conn *c, long *counter) {
    if (streams && c->state >= HEAD && c->state <= TO_CLOSE) count.streaming--;
    (*counter)++;
    close_conn(c);
}

static void rest(struct conn *c) {
    c->state = RESTING;
    resting++;
    watch(c, 0);
}

static void open_conn(struct conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) { perror("load: socket"); exit(1); }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    c->state = CONNECTING;
    count.opened++;
    if (++count.open > count.peak_open) count.peak_open = count.open;
    connecting++;
    if (connect(c->fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS) { fail(c, &count.connect_failed); return; }
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
    c->wants_out = 1;
}

static void send_some(struct conn *c) {
    while (c->sent < request_len) {
        ssize_t n = send(c->fd, request + c->sent, request_len - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) { watch(c, 1); return; }
        if (n < 0) { fail(c, &count.closed); return; }
        c->sent += n;
    }
    watch(c, 0);
    c->state = HEAD;
    if (streams && ++count.streaming > count.peak_streaming) count.peak_streaming = count.streaming;
}

static void begin_request(struct conn *c) {
    count.started++;
    c->sent_requests++;
    c->sent = c->head_len = 0;
    c->status = c->closes = c->done = c->failed = 0;
    c->digits = c->trailer_len = c->line_len = 0;
    c->events = 0;
    if (mark) {
        char number[32];
        snprintf(number, sizeof number, "%0*ld", mark_len, first_number + count.started - 1);
        memcpy(mark, number, mark_len);
    }
    c->began_us = now_us();
    c->state = SENDING;
    send_some(c);
}

static void rest_or_repeat(struct conn *c) {
    if (c->closes) close_conn(c);
    else if (may_begin(c)) begin_request(c);
    else rest(c);
}

/* The whole answer is here. */
static void finish(struct conn *c) {
    if (streams) count.streaming--;
    count.statuses[c->status]++;
    last_answer_us = now_us();
    if (c->status != 200) count.bad_status++;
    else if (streams && c->failed) count.error_events++;
    else if (streams && !c->done) count.no_done++;
    else {
        if ((size_t)count.answers == latencies_cap)
            latencies = grow(latencies, (latencies_cap = latencies_cap ? latencies_cap * 2 : 65536) * sizeof *latencies);
        latencies[count.answers++] = last_answer_us - c->began_us;
        if (streams) count.streams++;
    }
    rest_or_repeat(c);
}

static void end_line(struct conn *c) {
    int len = c->line_len > LINE_BYTES ? LINE_BYTES : c->line_len;
    if (len && c->line[len - 1] == '\r') len--;
    if (len >= 5 && !memcmp(c->line, "data:", 5)) {
        const char *value = c->line + 5, *end = c->line + len;
        while (value < end && *value == ' ') value++;
        c->done = end - value == 6 && !memcmp(value, "[DONE]", 6);
        if (end - value >= 8 && !memcmp(value, "{\"error\"", 8)) c->failed = 1;
        c->events++;
        count.events++;
    }
    c->line_len = 0;
}

static void take_body(struct conn *c, const char *bytes, size_t len) {
    count.body_bytes += len;
    if (!streams || c->status != 200) return;
    while (len) {
        const char *end = memchr(bytes, '\n', len);
        size_t piece = end ? (size_t)(end - bytes) : len;
        for (size_t i = 0; i < piece && c->line_len < LINE_BYTES; i++) c->line[c->line_len++] = bytes[i];
        if (!end) return;
        end_line(c);
        bytes += piece + 1;
        len -= piece + 1;
    }
}

static int header_is(const char *line, const char *name, const char **value) {
    size_t n = strlen(name);
    if (strncasecmp(line, name, n) || line[n] != ':') return 0;
    *value = line + n + 1;
    while (**value == ' ') (*value)++;
    return 1;
}

/* Reads the head that lies zero-terminated in c->head and says how the body will end. Returns 0 when it is no head. */
static int read_head(struct conn *c) {
    const char *value;
    int chunked = 0, sized = 0;
    if (sscanf(c->head, "HTTP/1.%*d %d", &c->status) != 1 || c->status < 100 || c->status > 599) return 0;
    for (char *line = strstr(c->head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n")) {
        const char *at = line + 2;
        if (header_is(at, "content-length", &value)) { sized = 1; c->left = strtoull(value, NULL, 10); }
        else if (header_is(at, "transfer-encoding", &value)) chunked = !strncasecmp(value, "chunked", 7);
        else if (header_is(at, "connection", &value)) c->closes = !strncasecmp(value, "close", 5);
    }
    c->state = chunked ? CHUNK_SIZE : sized ? SIZED : TO_CLOSE;
    c->digits = 0; c->trailer_len = 0;
    if (chunked) c->left = 0;
    return 1;
}

static int hex(char b) {
    return b >= '0' && b <= '9' ? b - '0' : (b | 32) >= 'a' && (b | 32) <= 'f' ? (b | 32) - 'a' + 10 : -1;
}

static void take(struct conn *c, const char *bytes, size_t len) {
    while (len) {
        switch (c->state) {
        case HEAD: {
            if (c->head_len + 1 >= HEAD_BYTES) { fail(c, &count.bad_framing); return; }
            c->head[c->head_len++] = *bytes++; len--;
            if (c->head_len < 4 || memcmp(c->head + c->head_len - 4, "\r\n\r\n", 4)) break;
            c->head[c->head_len - 2] = 0;
            if (!read_head(c)) { fail(c, &count.bad_framing); return; }
            if (c->status == 100) { c->head_len = 0; c->state = HEAD; break; }
            if (c->state == SIZED && !c->left) { finish(c); if (len) goto surplus; return; }
            break;
        }
        case SIZED: {
            size_t n = len < c->left ? len : c->left;
            take_body(c, bytes, n);
            bytes += n; len -= n; c->left -= n;
            if (!c->left) { finish(c); if (len) goto surplus; return; }
            break;
        }
        case CHUNK_SIZE: {
            char b = *bytes++; len--;
            int digit = hex(b);
            if (digit >= 0 && c->digits < 8) { c->left = c->left * 16 + digit; c->digits++; }
            else if (b == '\n' && c->digits) { c->state = c->left ? CHUNK_DATA : TRAILER; c->digits = 0; }
            else if (b != '\r' || !c->digits) { fail(c, &count.bad_framing); return; }
            break;
        }
        case CHUNK_DATA: {
            size_t n = len < c->left ? len : c->left;
            take_body(c, bytes, n);
            bytes += n; len -= n; c->left -= n;
            if (!c->left) c->state = CHUNK_END;
            break;
        }
        case CHUNK_END: {
            char b = *bytes++; len--;
            if (b == '\n') { c->state = CHUNK_SIZE; c->left = 0; c->digits = 0; }
            else if (b != '\r') { fail(c, &count.bad_framing); return; }
            break;
        }
        case TRAILER: {
            char b = *bytes++; len--;
            if (b == '\n') {
                if (!c->trailer_len) { finish(c); if (len) goto surplus; return; }
                c->trailer_len = 0;
            } else if (b != '\r') c->trailer_len++;
            break;
        }
        case TO_CLOSE:
            take_body(c, bytes, len);
            return;
        default:
            goto surplus;
        }
    }
    return;
surplus:                                     /* bytes beyond the answer: whoever sent them is out of step */
    if (c->state != CLOSED) fail(c, &count.bad_framing);
}

static void readable(struct conn *c) {
    static char bytes[256 << 10];
    ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) { take(c, bytes, n); return; }
    if (c->state == RESTING) close_conn(c);
    else if (n == 0 && c->state == TO_CLOSE) { c->closes = 1; finish(c); }
    else fail(c, &count.closed);
}

static void on_ready(struct conn *c, uint32_t events) {
    if (c->state == CONNECTING) {
        int error = 0;
        socklen_t len = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len);
        if (error) { fail(c, &count.connect_failed); return; }
        connecting--;
        if (may_begin(c)) begin_request(c);
        else rest(c);
        return;
    }
    if ((events & EPOLLOUT) && c->state == SENDING) send_some(c);
    if (c->state != CLOSED && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) readable(c);
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static uint32_t quantile(double q) {
    return count.answers ? latencies[(size_t)((count.answers - 1) * q + 0.5)] : 0;
}

static void report(int64_t began_us, const char *latency_file) {
    if (latency_file) {
        FILE *f = fopen(latency_file, "wb");
        if (!f || fwrite(latencies, sizeof *latencies, count.answers, f) != (size_t)count.answers || fclose(f)) perror("load: latencies");
    }
    qsort(latencies, count.answers, sizeof *latencies, by_size);
    printf("{\"requests\":%ld,\"answers\":%ld,\"streams\":%ld,\"events\":%ld,\"body_bytes\":%ld,\"seconds\":%.6f,"
           "\"opened\":%ld,\"open\":%ld,\"peak_open\":%ld,\"peak_streaming\":%ld,\"p50_us\":%u,\"p90_us\":%u,\"p99_us\":%u,\"max_us\":%u,"
           "\"errors\":{\"connect\":%ld,\"closed\":%ld,\"framing\":%ld,\"no_done\":%ld,\"error_event\":%ld,\"status\":%ld,\"unfinished\":%ld},"
           "\"statuses\":{",
           count.started, count.answers, count.streams, count.events, count.body_bytes,
           (last_answer_us > began_us ? last_answer_us - began_us : 0) / 1e6, count.opened, count.open, count.peak_open,
           count.peak_streaming, quantile(0.5), quantile(0.9), quantile(0.99), quantile(1),
           count.connect_failed, count.closed, count.bad_framing, count.no_done, count.error_events, count.bad_status, count.unfinished);
    const char *comma = "";
    for (int i = 0; i < 600; i++)
        if (count.statuses[i]) { printf("%s\"%d\":%ld", comma, i, count.statuses[i]); comma = ","; }
    printf("}}\n");
    fflush(stdout);
}

static char *slurp(const char *path, size_t *len) {
    FILE *f = fopen(path, "rb");
    struct stat about;
    if (!f || fstat(fileno(f), &about)) { perror(path); exit(2); }
    char *bytes = grow(NULL, about.st_size + 1);
    *len = fread(bytes, 1, about.st_size, f);
    fclose(f);
    return bytes;
}

static void write_request(const char *path, const char *headers, const char *body, size_t body_len) {
    request = grow(NULL, strlen(path) + strlen(headers) + body_len + 256);
    int n = sprintf(request, "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                    "Content-Length: %zu\r\n%s\r\n", path, port, body_len, headers);
    memcpy(request + n, body, body_len);
    request_len = n + body_len;
    char *run = memmem(request + n, body_len, "%%%%%%%%%%", 10);
    if (!run) return;
    for (mark = run; mark + mark_len < request + request_len && run[mark_len] == '%' && mark_len < 18; ) mark_len++;
}

int main(int argc, char **argv) {
    const char *path = "/v1/chat/completions", *body_file = NULL, *latency_file = NULL;
    static char headers[8192];
    int connections = 1;
    double seconds = -1, limit_s = 120;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--stream")) { streams = 1; continue; }
        if (!strcmp(argv[i], "--hold")) { hold = 1; continue; }
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!value) { fprintf(stderr, "load: %s needs a value\n", argv[i]); return 2; }
        if (!strcmp(argv[i], "--port")) port = atoi(value);
        else if (!strcmp(argv[i], "--path")) path = value;
        else if (!strcmp(argv[i], "--body")) body_file = value;
        else if (!strcmp(argv[i], "--connections")) connections = atoi(value);
        else if (!strcmp(argv[i], "--requests")) max_requests = atol(value);
        else if (!strcmp(argv[i], "--each")) max_each = atol(value);
        else if (!strcmp(argv[i], "--first")) first_number = atol(value);
        else if (!strcmp(argv[i], "--seconds")) seconds = atof(value);
        else if (!strcmp(argv[i], "--limit-s")) limit_s = atof(value);
        else if (!strcmp(argv[i], "--latencies")) latency_file = value;
        else if (!strcmp(argv[i], "--header")) {
            if (strlen(headers) + strlen(value) + 3 > sizeof headers) { fprintf(stderr, "load: headers too long\n"); return 2; }
            strcat(strcat(headers, value), "\r\n");
        } else { fprintf(stderr, "load: unknown option %s\n", argv[i]); return 2; }
        i++;
    }
    if (!port || !body_file || connections < 1 || (max_requests < 0 && seconds < 0 && max_each < 0)) {
        fprintf(stderr, "load: --port, --body and one of --requests, --seconds, --each are needed\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    size_t body_len;
    char *body = slurp(body_file, &body_len);
    write_request(path, headers, body, body_len);

    poller = epoll_create1(EPOLL_CLOEXEC);
    struct conn *all = calloc(connections, sizeof *all);
    struct epoll_event ready[512];
    reopen = calloc(connections, sizeof *reopen);
    if (!all || !reopen) { perror("load: calloc"); return 1; }
    int64_t began = now_us(), limit = began + (int64_t)(limit_s * 1e6);
    stop_us = seconds < 0 ? INT64_MAX : began + (int64_t)(seconds * 1e6);
    int next = 0;                            /* the first connection that was never opened */
    while (count.connect_failed < MAX_CONNECT_FAILED && now_us() < limit) {
        while (next < connections && connecting < MAX_CONNECTING && some_remain()) open_conn(&all[next++]);
        for (long left = closed; left > 0 && connecting < MAX_CONNECTING && some_remain(); left--) {
            struct conn *c = reopen[left - 1];
            if (!may_begin(c)) continue;
            reopen[left - 1] = reopen[--closed];
            open_conn(c);
        }
        if (next == resting + closed && (next == connections || !some_remain())) break;
        int n = epoll_wait(poller, ready, 512, 100);
        for (int i = 0; i < n; i++) on_ready(ready[i].data.ptr, ready[i].events);
    }
    for (int i = 0; i < next; i++) count.unfinished += all[i].state != CLOSED && all[i].state != RESTING;
    report(began, latency_file);
    if (hold) { char byte; while (read(0, &byte, 1) > 0); }
    return 0;
}
