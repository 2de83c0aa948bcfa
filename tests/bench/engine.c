/* An engine that costs almost nothing, so that the router in front of it is what a bench measures.
 *
 * One thread, one epoll set, one timer. It answers like vLLM: a small JSON answer for a plain request, chunked
 * server-sent events for a streamed one, /v1/models, /health, /metrics. A plain answer may be held for a fixed
 * time; a stream sends its events at a fixed interval. Both waits are exact to the timerfd's resolution: epoll's own
 * timeout is whole milliseconds, which would drown the added latency of a router.
 *
 * It also misbehaves when told to, so that a test can prove that the load generator notices.
 *
 *   engine [--port P] [--model NAME] [--delay-ms D] [--events N] [--interval-ms T]
 *          [--break none|cut|nodone|short|status] [--log]
 *
 * The port is chosen by the kernel when it is 0, and printed as the first line. `max_tokens` in a request overrides
 * --events for that request. GET /bench/stats answers with what was counted.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_BODY = 64 << 20, READ_BYTES = 64 << 10, DEFAULT_EVENTS = 50 };
enum phase { READING, HELD, STREAMING };
enum fault { FAULT_NONE, FAULT_CUT, FAULT_NODONE, FAULT_SHORT, FAULT_STATUS };

struct conn {
    int fd, closing, wants_out;
    enum phase phase;
    char *in; size_t in_len, in_cap;
    char *out; size_t out_off, out_len, out_cap;
    int sent, total, usage;          /* events of the stream in progress */
    int64_t due_ns;
    int place;                       /* index in the heap, -1 when not in it */
};

static struct conn **conns; static int conns_cap;
static struct conn **heap; static int heap_len, heap_cap;
static int poller, timer;
static int64_t armed_ns;
static const char *model = "bench";
static int64_t delay_ns, interval_ns = 20 * 1000000LL;
static int default_events = DEFAULT_EVENTS, log_paths;
static enum fault fault;
static char answer[1024], event_role[1024], event_text[1024], event_last[1024], event_usage[1024];
static size_t answer_len, role_len, text_len, last_len, usage_len;
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\nserver: bench\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";

static struct { long requests, streams, finished, aborted, active, peak, unknown; } stats;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *grow(void *block, size_t bytes) {
    void *fresh = realloc(block, bytes);
    if (!fresh) { perror("realloc"); exit(1); }
    return fresh;
}

/* --- what is due next: a binary heap that knows where each connection stands, so that one can leave it --- */

static void put_at(int i, struct conn *c) { heap[i] = c; c->place = i; }

static void sift(int i) {
    struct conn *c = heap[i];
    while (i > 0 && heap[(i - 1) / 2]->due_ns > c->due_ns) { put_at(i, heap[(i - 1) / 2]); i = (i - 1) / 2; }
    for (;;) {
        int child = 2 * i + 1;
        if (child + 1 < heap_len && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
        if (child >= heap_len || heap[child]->due_ns >= c->due_ns) break;
        put_at(i, heap[child]); i = child;
    }
    put_at(i, c);
}

static void unschedule(struct conn *c) {
    if (c->place < 0) return;
    int i = c->place;
    struct conn *last = heap[--heap_len];
    c->place = -1;
    if (last != c) { put_at(i, last); sift(i); }
}

static void schedule(struct conn *c, int64_t due_ns) {
    unschedule(c);
    if (heap_len == heap_cap) heap = grow(heap, (heap_cap = heap_cap ? heap_cap * 2 : 1024) * sizeof *heap);
    c->due_ns = due_ns;
    heap[heap_len] = c; c->place = heap_len++;
    sift(c->place);
}

static void arm(void) {
    int64_t next = heap_len ? heap[0]->due_ns : 0;
    if (next == armed_ns) return;
    struct itimerspec when = {.it_value = {next / 1000000000LL, next % 1000000000LL}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
    armed_ns = next;
}

/* --- connections --- */

static void watch(struct conn *c, int wants_out) {
    if (c->wants_out == wants_out) return;
    c->wants_out = wants_out;
    struct epoll_event e = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0), .data.fd = c->fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

static void drop(struct conn *c) {
    if (c->phase != READING) stats.aborted++;
    if (c->phase == STREAMING) stats.active--;
    unschedule(c);
    conns[c->fd] = NULL;
    close(c->fd);
    free(c->in); free(c->out); free(c);
}

/* Returns 0 when the connection is gone. */
static int flush_out(struct conn *c) {
    while (c->out_off < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) { watch(c, 1); return 1; }
        if (n < 0) { drop(c); return 0; }
        c->out_off += n;
    }
    c->out_off = c->out_len = 0;
    watch(c, 0);
    if (c->closing && c->phase == READING) { drop(c); return 0; }
    return 1;
}

static void say(struct conn *c, const char *bytes, size_t len) {
    if (c->out_len + len > c->out_cap) c->out = grow(c->out, c->out_cap = (c->out_len + len) * 2);
    memcpy(c->out + c->out_len, bytes, len);
    c->out_len += len;
}

static void say_answer(struct conn *c, const char *status, const char *type, const char *body, size_t len) {
    char head[256];
    int n = snprintf(head, sizeof head, "HTTP/1.1 %s\r\nserver: bench\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n",
                     status, type, len);
    say(c, head, n);
    say(c, body, len);
}

/* --- the answers --- */

static size_t chunked(char *to, const char *payload) {
    return sprintf(to, "%zx\r\n%s\r\n", strlen(payload), payload);
}

static void write_templates(void) {
    char text[900];
    const char *start = "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":";
    answer_len = snprintf(answer, sizeof answer,
        "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"%s\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"Four words, no more.\",\"refusal\":null,\"tool_calls\":[]},"
        "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":12,"
        "\"total_tokens\":18,\"completion_tokens\":6,\"prompt_tokens_details\":null},\"prompt_logprobs\":null}", model);
    snprintf(text, sizeof text, "%s\"%s\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
             "\"logprobs\":null,\"finish_reason\":null}]}\n\n", start, model);
    role_len = chunked(event_role, text);
    snprintf(text, sizeof text, "%s\"%s\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},"
             "\"logprobs\":null,\"finish_reason\":null}]}\n\n", start, model);
    text_len = chunked(event_text, text);
    snprintf(text, sizeof text, "%s\"%s\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},"
             "\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}]}\n\n", start, model);
    last_len = chunked(event_last, text);
    snprintf(text, sizeof text, "%s\"%s\",\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"total_tokens\":62,"
             "\"completion_tokens\":50}}\n\n", start, model);
    usage_len = chunked(event_usage, text);
}

static void say_page(struct conn *c, const char *path) {
    char body[2048];
    int n = 0;
    const char *type = "application/json";
    if (!strcmp(path, "/v1/models"))
        n = snprintf(body, sizeof body, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1760000000,"
                     "\"owned_by\":\"vllm\",\"root\":\"%s\",\"parent\":null,\"max_model_len\":32768,\"permission\":[]}]}", model, model);
    else if (!strcmp(path, "/health") || !strcmp(path, "/ping"))
        type = "text/plain";
    else if (!strcmp(path, "/version"))
        n = snprintf(body, sizeof body, "{\"version\":\"0.32.0\"}");
    else if (!strcmp(path, "/bench/stats"))
        n = snprintf(body, sizeof body, "{\"requests\":%ld,\"streams\":%ld,\"finished\":%ld,\"aborted\":%ld,\"active\":%ld,"
                     "\"peak\":%ld,\"unknown\":%ld}", stats.requests, stats.streams, stats.finished, stats.aborted,
                     stats.active, stats.peak, stats.unknown);
    else if (!strcmp(path, "/metrics")) {
        type = "text/plain; version=0.0.4; charset=utf-8";
        n = snprintf(body, sizeof body,
                     "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"%s\"} %ld\n"
                     "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"%s\"} 0.0\n"
                     "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"%s\"} %.6f\n",
                     model, stats.active, model, model, stats.active / 10000.0);
    } else {
        stats.unknown++;
        n = snprintf(body, sizeof body, "{\"detail\":\"Not Found\"}");
        say_answer(c, "404 Not Found", type, body, n);
        return;
    }
    say_answer(c, "200 OK", type, body, n);
}

/* The reply to a chat or completion request: now, or when it is due. */
static void say_generated(struct conn *c) {
    if (fault == FAULT_STATUS) {
        static const char refused[] = "{\"error\":{\"message\":\"told to fail\",\"type\":\"server_error\",\"param\":null,\"code\":500}}";
        say_answer(c, "500 Internal Server Error", "application/json", refused, sizeof refused - 1);
    } else if (fault == FAULT_CUT) {
        static const char promise[] = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{";
        say(c, promise, sizeof promise - 1);
        c->closing = 1;
    } else
        say_answer(c, "200 OK", "application/json", answer, answer_len);
    stats.finished++;
    c->phase = READING;
}

static void begin_stream(struct conn *c, int64_t now) {
    stats.streams++;
    if (++stats.active > stats.peak) stats.peak = stats.active;
    c->phase = STREAMING;
    c->sent = 0;
    say(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    say(c, event_role, role_len);
    schedule(c, now + interval_ns);
}

static void end_stream(struct conn *c) {
    stats.active--;
    stats.finished++;
    c->phase = READING;
}

/* One more event. The last one brings usage, the end mark and the end of the body with it, as vLLM does. */
static void say_event(struct conn *c) {
    if (++c->sent < c->total) {
        if (fault == FAULT_CUT && c->sent * 2 >= c->total) {
            c->closing = 1;
            end_stream(c);
            return;
        }
        say(c, event_text, text_len);
        schedule(c, c->due_ns + interval_ns);
        return;
    }
    if (fault != FAULT_SHORT) say(c, event_last, last_len);
    if (c->usage) say(c, event_usage, usage_len);
    if (fault != FAULT_NODONE) say(c, "e\r\ndata: [DONE]\n\n\r\n", 19);
    say(c, "0\r\n\r\n", 5);
    end_stream(c);
}

/* --- requests --- */

static const char *header(const char *head, const char *end, const char *name) {
    size_t len = strlen(name);
    for (const char *line = memmem(head, end - head, "\r\n", 2); line && line + 2 < end; ) {
        line += 2;
        if ((size_t)(end - line) > len && !strncasecmp(line, name, len) && line[len] == ':') {
            const char *value = line + len + 1;
            while (*value == ' ') value++;
            return value;
        }
        line = memmem(line, end - line, "\r\n", 2);
    }
    return NULL;
}

/* The byte after a JSON key's colon at any depth: enough for bodies that the bench itself wrote. */
static const char *field(const char *body, size_t len, const char *quoted) {
    const char *at = memmem(body, len, quoted, strlen(quoted));
    if (!at) return NULL;
    at += strlen(quoted);
    while (at < body + len && (*at == ' ' || *at == ':')) at++;
    return at < body + len ? at : NULL;
}

static void take_request(struct conn *c, char *head, const char *body, size_t len) {
    char method[8] = "", path[256] = "";
    sscanf(head, "%7s %255[^ ?]", method, path);
    stats.requests++;
    if (log_paths) fprintf(stderr, "%s %s %.*s\n", method, path, (int)(len < 300 ? len : 300), body);
    if (strcmp(method, "POST") || strncmp(path, "/v1/", 4)) { stats.requests--; say_page(c, path); return; }
    const char *stream = field(body, len, "\"stream\""), *limit = field(body, len, "\"max_tokens\"");
    const char *usage = field(body, len, "\"include_usage\"");
    c->total = limit && atoi(limit) > 0 ? atoi(limit) : default_events;
    c->usage = usage && *usage == 't';
    int64_t now = now_ns();
    if (stream && *stream == 't' && fault != FAULT_STATUS) begin_stream(c, now);
    else if (delay_ns) { c->phase = HELD; schedule(c, now + delay_ns); }
    else say_generated(c);
}

/* Answers every whole request in the buffer, stopping at one that has to wait. */
static void take_requests(struct conn *c) {
    size_t used = 0;
    while (c->phase == READING && !c->closing) {
        char *head = c->in + used, *end = memmem(head, c->in_len - used, "\r\n\r\n", 4);
        if (!end) break;
        if (strncmp(head, "PRI ", 4) == 0) { c->closing = 1; break; }      /* HTTP/2 by prior knowledge: not spoken here */
        char kept = end[2];
        end[2] = 0;
        const char *length = header(head, end + 2, "content-length"), *coding = header(head, end + 2, "transfer-encoding");
        const char *connection = header(head, end + 2, "connection");
        size_t body_len = length ? strtoul(length, NULL, 10) : 0;
        int closes = connection && !strncasecmp(connection, "close", 5);
        end[2] = kept;
        if (coding || body_len > MAX_BODY) {
            say_answer(c, "411 Length Required", "text/plain", "", 0);
            c->closing = 1;
            break;
        }
        if ((size_t)(end + 4 - c->in) + body_len > c->in_len) break;
        c->closing = closes;
        take_request(c, head, end + 4, body_len);
        used = end + 4 - c->in + body_len;
    }
    memmove(c->in, c->in + used, c->in_len - used);
    c->in_len -= used;
}

static void readable(struct conn *c) {
    if (c->in_cap - c->in_len < READ_BYTES / 16)
        c->in = grow(c->in, (c->in_cap = c->in_cap ? c->in_cap * 2 : READ_BYTES / 8) + 1);
    ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) { drop(c); return; }
    c->in_len += n;
    if (c->in_len > (size_t)MAX_BODY) { drop(c); return; }
    take_requests(c);
    flush_out(c);
}

static void run_due(void) {
    uint64_t fired;
    if (read(timer, &fired, sizeof fired) < 0 && errno != EAGAIN) perror("timer");
    armed_ns = 0;
    int64_t now = now_ns();
    while (heap_len && heap[0]->due_ns <= now) {
        struct conn *c = heap[0];
        unschedule(c);
        if (c->phase == HELD) say_generated(c);
        else say_event(c);
        if (!flush_out(c)) continue;
        if (c->phase == READING && c->in_len) { take_requests(c); flush_out(c); }
    }
}

static void accept_all(int listener) {
    for (int i = 0; i < 256; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), one = 1;
        if (fd < 0) return;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (fd >= conns_cap) {
            int cap = fd * 2 + 64;
            conns = grow(conns, cap * sizeof *conns);
            memset(conns + conns_cap, 0, (cap - conns_cap) * sizeof *conns);
            conns_cap = cap;
        }
        struct conn *c = calloc(1, sizeof *c);
        if (!c) { perror("calloc"); exit(1); }
        c->fd = fd; c->place = -1;
        conns[fd] = c;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
}

static enum fault fault_named(const char *name) {
    static const char *const names[] = {"none", "cut", "nodone", "short", "status"};
    for (int i = 0; i < 5; i++) if (!strcmp(name, names[i])) return (enum fault)i;
    fprintf(stderr, "engine: unknown fault %s\n", name);
    exit(2);
}

int main(int argc, char **argv) {
    int port = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--log")) { log_paths = 1; continue; }
        if (!value) { fprintf(stderr, "engine: %s needs a value\n", argv[i]); return 2; }
        if (!strcmp(argv[i], "--port")) port = atoi(value);
        else if (!strcmp(argv[i], "--model")) model = value;
        else if (!strcmp(argv[i], "--delay-ms")) delay_ns = (int64_t)(atof(value) * 1e6);
        else if (!strcmp(argv[i], "--events")) default_events = atoi(value);
        else if (!strcmp(argv[i], "--interval-ms")) interval_ns = (int64_t)(atof(value) * 1e6);
        else if (!strcmp(argv[i], "--break")) fault = fault_named(value);
        else { fprintf(stderr, "engine: unknown option %s\n", argv[i]); return 2; }
        i++;
    }
    if (strlen(model) > 200 || default_events < 1 || interval_ns < 1) { fprintf(stderr, "engine: bad value\n"); return 2; }
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    write_templates();

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t at_len = sizeof at;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096)) { perror("engine: listen"); return 1; }
    getsockname(listener, (struct sockaddr *)&at, &at_len);

    poller = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, ready[512];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    e.data.fd = timer;
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &e);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    for (;;) {
        arm();
        int n = epoll_wait(poller, ready, 512, -1);
        int due = 0;
        for (int i = 0; i < n; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) { accept_all(listener); continue; }
            if (fd == timer) { due = 1; continue; }
            struct conn *c = conns[fd];
            if (!c) continue;
            if (ready[i].events & EPOLLOUT) { if (!flush_out(c)) continue; }
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
        }
        if (due) run_due();
    }
}
