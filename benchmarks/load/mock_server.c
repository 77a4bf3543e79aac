/* A streaming chat-completions server that is never the bottleneck and knows when it sent each token.
 *
 * One thread, epoll, Linux, C11, no dependency but libc:  cc -O2 -o mock_server mock_server.c
 * With TLS 1.3 (--tls FILE: certificate and key, PEM):    cc -O2 -DTLS -o mock_server mock_server.c -lssl -lcrypto
 *
 * --streams FILE: request k is answered with the k-th recorded stream of a file (mock.py: write_streams), cyclically.
 *
 * Every token of a stream has an absolute time (arrival + TTFT + k * ITL) and is one send() of one vLLM-shaped
 * chunk. Stamps are CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns(). On SIGTERM the truth is written:
 * one line per request, tab-separated:
 *
 *   id  arrival_ns  planned_tokens  ended_ns  t1 t2 t3 ...   (t: ns after arrival_ns at which send() was called)
 *
 * and one JSON object about the server itself (its lateness, its CPU time) goes to stdout.
 */
#define _GNU_SOURCE
#ifndef __linux__
#error "the mock server needs Linux (epoll, ppoll)"
#endif

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
static SSL_CTX *tls;
#else
typedef void SSL;
#endif

#define BATCH 8            /* tokens sent in a row before sockets are looked at: arrivals are stamped at once */
#define SPIN_NS 4000       /* a shorter wait than this is not worth a sleep */
#define HEAD_MAX 65536     /* bytes of request headers */
#define BODY_MAX (64u << 20)
#define ID_MAX 128
#define LATE_BUCKETS 200000 /* 1 us each */

typedef struct {
  char id[ID_MAX];
  int64_t arrival_ns, ended_ns;
  int32_t planned, sent;
  int64_t *at_ns;
} Record;

typedef struct {
  char *bytes;
  size_t length, room;
} Buffer;

typedef struct {
  bool open, known, streaming, usage, usage_each, wants_write;
  uint32_t generation; /* a queue entry of an older one is stale */
  Buffer in, out;
  size_t record;
  int64_t first_due_ns; /* engine time */
  int32_t prompt_tokens;
  uint64_t number;
  const char *piece; /* of a recorded stream: the next one */
  SSL *ssl;
} Connection;

typedef struct {
  int64_t due_ns; /* engine time */
  int fd;
  uint32_t generation;
} Due;

/* Waits of one kind are equally long, so each queue is sorted by itself. */
typedef struct {
  Due *entries;
  size_t head, length, room; /* room is a power of two */
} Queue;

static int64_t ttft_ns = 50000000, itl_ns = 10000000, stall_ns;
static int32_t fixed_tokens;
static size_t stall_after_requests;
static const char *truth_path;

static int poll_fd, listen_fd;
static Connection *connections;
static size_t connection_room;
static Record *records;
static size_t record_count, record_room;
static Queue first_tokens, next_tokens;
static int64_t stalled_ns;       /* engine time is CLOCK_MONOTONIC less this */
static int64_t stall_until_ns;   /* engine time stands still until then */
static int64_t stall_began_ns;
static const char **streams; /* recorded ones: the first piece of each */
static uint32_t stream_count;
static uint32_t late_us[LATE_BUCKETS];
static uint64_t tokens_sent, blocked_sends, connections_opened, sessions_resumed;
static int64_t late_max_ns;
static volatile sig_atomic_t stopping;

static const char *const WORDS[16] = {" the", " of", " load", " stage", " token", " rate", " queue", " batch",
                                      " and", " a", " model", " window", " cache", " slow", " fast", " engine"};

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void die(const char *what) {
  perror(what);
  exit(1);
}

static void *grow(void *old, size_t bytes) {
  void *found = realloc(old, bytes);
  if (!found) die("realloc");
  return found;
}

static void append(Buffer *buffer, const char *bytes, size_t length) {
  if (buffer->length + length > buffer->room) {
    buffer->room = (buffer->length + length) * 2 + 1024;
    buffer->bytes = grow(buffer->bytes, buffer->room);
  }
  memcpy(buffer->bytes + buffer->length, bytes, length);
  buffer->length += length;
}

static void push(Queue *queue, Due due) {
  if (queue->length == queue->room) {
    size_t room = queue->room ? queue->room * 2 : 1024;
    Due *entries = grow(NULL, room * sizeof(Due));
    for (size_t i = 0; i < queue->length; i++) entries[i] = queue->entries[(queue->head + i) & (queue->room - 1)];
    free(queue->entries);
    queue->entries = entries;
    queue->head = 0;
    queue->room = room;
  }
  queue->entries[(queue->head + queue->length++) & (queue->room - 1)] = due;
}

static Due *peek(Queue *queue) { return queue->length ? &queue->entries[queue->head] : NULL; }

static void pop(Queue *queue) {
  queue->head = (queue->head + 1) & (queue->room - 1);
  queue->length--;
}

/* Engine time: it stands still while the server is stalled, so that every stream goes on at its pace afterwards. */
static int64_t engine_ns(int64_t now) {
  if (stall_until_ns && now < stall_until_ns) return stall_began_ns - stalled_ns;
  if (stall_until_ns) {
    stalled_ns += stall_until_ns - stall_began_ns;
    stall_until_ns = 0;
  }
  return now - stalled_ns;
}

/* -- output ------------------------------------------------------------------------------------------------ */

static void watch(int fd, Connection *c, bool write) {
  if (c->wants_write == write) return;
  c->wants_write = write;
  struct epoll_event event = {.events = EPOLLIN | (write ? EPOLLOUT : 0u), .data.fd = fd};
  epoll_ctl(poll_fd, EPOLL_CTL_MOD, fd, &event);
}

static void drop(int fd) {
  Connection *c = &connections[fd];
  if (c->streaming) records[c->record].ended_ns = now_ns();
#ifdef TLS
  SSL_free(c->ssl);
#endif
  close(fd);
  free(c->in.bytes);
  free(c->out.bytes);
  uint32_t generation = c->generation + 1;
  memset(c, 0, sizeof *c);
  c->generation = generation;
}

#ifdef TLS
/* As send() and recv(): the handshake is made within them, errno is EAGAIN until the socket is ready. */
static ssize_t outcome(SSL *ssl, int done) {
  if (done > 0) return done;
  int error = SSL_get_error(ssl, done);
  ERR_clear_error();
  errno = error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? EAGAIN : EPIPE;
  return error == SSL_ERROR_ZERO_RETURN ? 0 : -1;
}
static ssize_t put(int fd, const char *bytes, size_t length) {
  SSL *ssl = connections[fd].ssl;
  return ssl ? outcome(ssl, SSL_write(ssl, bytes, (int)length)) : send(fd, bytes, length, MSG_NOSIGNAL);
}
static ssize_t get(int fd, char *bytes, size_t room) {
  SSL *ssl = connections[fd].ssl;
  return ssl ? outcome(ssl, SSL_read(ssl, bytes, (int)room)) : recv(fd, bytes, room, 0);
}
#else
static ssize_t put(int fd, const char *bytes, size_t length) { return send(fd, bytes, length, MSG_NOSIGNAL); }
static ssize_t get(int fd, char *bytes, size_t room) { return recv(fd, bytes, room, 0); }
#endif

/* One send(); what the socket does not take waits in c->out. False: the connection is gone. */
static bool transmit(int fd, const char *bytes, size_t length) {
  Connection *c = &connections[fd];
  if (!c->out.length) {
    ssize_t done = put(fd, bytes, length);
    if (done == (ssize_t)length) return true;
    if (done < 0 && errno != EAGAIN && errno != EINTR) {
      drop(fd);
      return false;
    }
    blocked_sends++;
    if (done > 0) bytes += done, length -= (size_t)done;
  }
  append(&c->out, bytes, length);
  watch(fd, c, true);
  return true;
}

static void flush(int fd) {
  Connection *c = &connections[fd];
  ssize_t done = put(fd, c->out.bytes, c->out.length);
  if (done < 0 && errno != EAGAIN && errno != EINTR) {
    drop(fd);
    return;
  }
  if (done > 0) {
    memmove(c->out.bytes, c->out.bytes + done, c->out.length - (size_t)done);
    c->out.length -= (size_t)done;
  }
  watch(fd, c, c->out.length > 0);
}

static void answer(int fd, const char *status, const char *body) {
  char text[2048];
  int n = snprintf(text, sizeof text,
                   "HTTP/1.1 %s\r\nServer: mock\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                   status, strlen(body), body);
  transmit(fd, text, (size_t)n);
}

/* One event as one HTTP chunk. `choices` is the inside of the array; completion < 0: no usage. Returns its length. */
static size_t event(char *out, size_t room, const Connection *c, const char *choices, int32_t completion) {
  char body[1024], usage[128] = "";
  if (completion >= 0)
    snprintf(usage, sizeof usage, ",\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d}",
             c->prompt_tokens, c->prompt_tokens + completion, completion);
  int n = snprintf(body, sizeof body,
                   "data: {\"id\":\"chatcmpl-%032llx\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,"
                   "\"model\":\"mock\",\"choices\":[%s]%s}\n\n",
                   (unsigned long long)c->number, choices, usage);
  return (size_t)snprintf(out, room, "%x\r\n%s\r\n", (unsigned)n, body);
}

/* The next piece of a recorded stream: how many tokens it has, and its bytes. */
static uint32_t next_piece(Connection *c, const char **bytes, size_t *length) {
  uint32_t numbers[2];
  memcpy(numbers, c->piece, sizeof numbers);
  *bytes = c->piece + sizeof numbers;
  *length = numbers[1];
  c->piece = *bytes + *length;
  return numbers[0];
}

static bool send_piece(int fd) {
  const char *bytes;
  size_t length;
  next_piece(&connections[fd], &bytes, &length);
  return transmit(fd, bytes, length);
}

static bool begin_stream(int fd) {
  static const char head[] =
      "HTTP/1.1 200 OK\r\nServer: mock\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
      "Transfer-Encoding: chunked\r\n\r\n";
  Connection *c = &connections[fd];
  char text[2048];
  if (c->piece) return send_piece(fd);
  memcpy(text, head, sizeof head - 1);
  size_t n = sizeof head - 1;
  n += event(text + n, sizeof text - n, c,
             "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
             "\"finish_reason\":null}",
             c->usage_each ? 0 : -1);
  return transmit(fd, text, n);
}

static bool end_stream(int fd) {
  Connection *c = &connections[fd];
  int32_t sent = records[c->record].sent;
  char text[4096];
  if (c->piece) {
    c->streaming = false;
    records[c->record].ended_ns = now_ns();
    return send_piece(fd);
  }
  size_t n = event(text, sizeof text, c,
                   "{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"length\","
                   "\"stop_reason\":null}",
                   c->usage_each ? sent : -1);
  if (c->usage) n += event(text + n, sizeof text - n, c, "", sent);
  static const char done[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  memcpy(text + n, done, sizeof done - 1);
  n += sizeof done - 1;
  c->streaming = false;
  records[c->record].ended_ns = now_ns();
  return transmit(fd, text, n);
}

static void read_requests(int fd);

static void send_token(int fd, int64_t due_engine_ns) {
  Connection *c = &connections[fd];
  Record *r = &records[c->record];
  char choices[256], text[1024];
  const char *bytes = text;
  size_t n;
  uint32_t tokens = 1;
  if (r->sent == 0 && !begin_stream(fd)) return;
  if (c->piece) {
    tokens = next_piece(c, &bytes, &n);
  } else {
    snprintf(
        choices, sizeof choices,
        "{\"index\":0,\"delta\":{\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}",
        WORDS[(c->number + (uint64_t)r->sent) & 15]);
    n = event(text, sizeof text, c, choices, c->usage_each ? r->sent + 1 : -1);
  }
  int64_t at = now_ns();
  for (uint32_t i = 0; i < tokens; i++) r->at_ns[r->sent++] = at - r->arrival_ns;
  int64_t late = at - stalled_ns - due_engine_ns;
  if (late > late_max_ns) late_max_ns = late;
  late_us[late < 0 ? 0 : late / 1000 >= LATE_BUCKETS ? LATE_BUCKETS - 1 : late / 1000]++;
  tokens_sent += tokens;
  if (!transmit(fd, bytes, n)) return;
  if (r->sent < r->planned) {
    push(&next_tokens, (Due){c->first_due_ns + (int64_t)r->sent * itl_ns, fd, c->generation});
  } else if (end_stream(fd)) {
    read_requests(fd); /* one that was sent ahead */
  }
}

/* Sends up to BATCH tokens that are due; returns the monotonic time of the next one, or INT64_MAX. */
static int64_t send_due(void) {
  int64_t now = now_ns(), engine = engine_ns(now);
  for (int sent = 0;;) {
    Due *a = peek(&first_tokens), *b = peek(&next_tokens);
    if (!a && !b) return INT64_MAX;
    Queue *queue = !b || (a && a->due_ns < b->due_ns) ? &first_tokens : &next_tokens;
    Due due = *peek(queue);
    if (due.due_ns > engine) {
      if (stall_until_ns) return stall_until_ns;
      return due.due_ns + stalled_ns;
    }
    if (sent == BATCH) return now;
    pop(queue);
    Connection *c = &connections[due.fd];
    if (c->generation != due.generation || !c->streaming) continue; /* the client went away */
    send_token(due.fd, due.due_ns);
    sent++;
  }
}

/* -- input ------------------------------------------------------------------------------------------------- */

/* The value behind "name": in a JSON text, found by a scan: good enough for requests that are well-formed. */
static const char *field(const char *body, size_t length, const char *name) {
  char quoted[64];
  int n = snprintf(quoted, sizeof quoted, "\"%s\"", name);
  const char *end = body + length, *at = memmem(body, length, quoted, (size_t)n);
  if (!at) return NULL;
  for (at += n; at < end && (*at == ' ' || *at == ':'); at++) {
  }
  return at < end ? at : NULL;
}

static bool is_true(const char *body, size_t length, const char *name) {
  const char *value = field(body, length, name);
  return value && value + 4 <= body + length && !memcmp(value, "true", 4);
}

static int32_t count_words(const char *body, size_t length) {
  const char *end = body + length, *at = field(body, length, "content");
  if (!at) at = field(body, length, "prompt");
  if (!at || *at != '"') return 1;
  int32_t words = 1;
  for (at++; at < end && *at != '"'; at++) {
    if (*at == '\\') at++;
    else if (*at == ' ') words++;
  }
  return words;
}

static const char *header(const char *head, const char *end, const char *name, size_t *length) {
  size_t n = strlen(name);
  for (const char *line = memmem(head, (size_t)(end - head), "\r\n", 2); line && line < end;) {
    line += 2;
    const char *stop = memmem(line, (size_t)(end - line) + 2, "\r\n", 2);
    if (!stop) return NULL;
    if ((size_t)(stop - line) > n && line[n] == ':' && !strncasecmp(line, name, n)) {
      for (line += n + 1; line < stop && *line == ' '; line++) {
      }
      *length = (size_t)(stop - line);
      return line;
    }
    line = stop;
  }
  return NULL;
}

static void start_stream(int fd, const char *id, size_t id_length, const char *body, size_t length, int64_t at) {
  Connection *c = &connections[fd];
  if (!is_true(body, length, "stream")) {
    answer(fd, "400 Bad Request", "{\"error\":{\"message\":\"the mock only streams: set stream to true\"}}");
    return;
  }
  const char *asked = field(body, length, "max_tokens");
  if (!asked) asked = field(body, length, "max_completion_tokens");
  int32_t tokens = fixed_tokens ? fixed_tokens : asked ? (int32_t)strtol(asked, NULL, 10) : 16;
  if (tokens < 1) tokens = 1;
  if (stream_count) {
    c->piece = streams[record_count % stream_count];
    memcpy(&tokens, c->piece, sizeof tokens); /* of the whole stream; its first piece follows */
    c->piece += sizeof tokens;
  }
  if (record_count == record_room) {
    record_room = record_room ? record_room * 2 : 4096;
    records = grow(records, record_room * sizeof(Record));
  }
  c->record = record_count;
  Record *r = &records[record_count++];
  memset(r, 0, sizeof *r);
  if (id_length >= ID_MAX) id_length = ID_MAX - 1;
  if (id_length) memcpy(r->id, id, id_length);
  else strcpy(r->id, "-");
  for (char *p = r->id; *p; p++)
    if (*p == '\t' || *p == '\n') *p = '_';
  r->arrival_ns = at;
  r->planned = tokens;
  r->at_ns = grow(NULL, (size_t)tokens * sizeof(int64_t));
  c->streaming = true;
  c->usage = is_true(body, length, "include_usage");
  c->usage_each = is_true(body, length, "continuous_usage_stats");
  c->prompt_tokens = count_words(body, length);
  c->number = record_count;
  c->first_due_ns = engine_ns(at) + ttft_ns;
  push(&first_tokens, (Due){c->first_due_ns, fd, c->generation});
  if (stall_after_requests && record_count == stall_after_requests) {
    stall_began_ns = at;
    stall_until_ns = at + stall_ns;
  }
}

static void respond(int fd, char *head, char *head_end, const char *body, size_t length, int64_t at) {
  size_t id_length = 0;
  const char *id = header(head, head_end, "X-Request-Id", &id_length);
  if (!strncmp(head, "POST /v1/chat/completions ", 26) || (stream_count && !strncmp(head, "POST ", 5)))
    start_stream(fd, id, id_length, body, length, at);
  else if (!strncmp(head, "GET /v1/models ", 15))
    answer(fd, "200 OK",
           "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"owned_by\":\"mock\","
           "\"max_model_len\":131072}]}");
  else if (!strncmp(head, "GET /health ", 12)) answer(fd, "200 OK", "{}");
  else answer(fd, "404 Not Found", "{\"detail\":\"Not Found\"}");
}

/* Answers every whole request in c->in, unless a stream is going on. */
static void read_requests(int fd) {
  Connection *c = &connections[fd];
  int64_t at = now_ns();
  while (c->open && !c->streaming && c->in.length) {
    char *head = c->in.bytes, *head_end = memmem(head, c->in.length, "\r\n\r\n", 4);
    if (!head_end) {
      if (c->in.length > HEAD_MAX) drop(fd);
      return;
    }
    size_t n = 0, length = 0;
    uint32_t generation = c->generation;
    const char *value = header(head, head_end, "Content-Length", &n);
    if (value) length = strtoul(value, NULL, 10);
    if (length > BODY_MAX || (!value && header(head, head_end, "Transfer-Encoding", &n))) {
      answer(fd, "411 Length Required", "{\"detail\":\"a Content-Length of at most 64 MiB is needed\"}");
      if (c->generation == generation) drop(fd);
      return;
    }
    size_t head_length = (size_t)(head_end - head) + 4, whole = head_length + length;
    if (c->in.length < whole) return;
    respond(fd, head, head_end, head + head_length, length, at);
    if (c->generation != generation) return; /* dropped while answering */
    memmove(c->in.bytes, c->in.bytes + whole, c->in.length - whole);
    c->in.length -= whole;
  }
}

static void receive(int fd) {
  Connection *c = &connections[fd];
  char bytes[65536];
  ssize_t n = get(fd, bytes, sizeof bytes);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    drop(fd);
    return;
  }
#ifdef TLS
  if (c->ssl && !c->known) sessions_resumed += (uint64_t)SSL_session_reused(c->ssl);
#endif
  c->known = true;
  append(&c->in, bytes, (size_t)n);
  read_requests(fd);
}

static void welcome(void) {
  for (;;) {
    int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    if ((size_t)fd >= connection_room) {
      size_t room = (size_t)fd * 2 + 64;
      connections = grow(connections, room * sizeof(Connection));
      memset(connections + connection_room, 0, (room - connection_room) * sizeof(Connection));
      connection_room = room;
    }
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connections[fd].open = true;
#ifdef TLS
    if (tls) {
      connections[fd].ssl = SSL_new(tls);
      SSL_set_fd(connections[fd].ssl, fd);
      SSL_set_accept_state(connections[fd].ssl);
    }
#endif
    connections_opened++;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event)) die("epoll_ctl");
  }
}

/* -- options ------------------------------------------------------------------------------------------------ */

/* The file: number of streams; of each its tokens and its pieces; of each piece its tokens, length and bytes. The
 * first piece of a stream goes before its first token, the last after its end: they have 0 tokens. */
static void load_streams(const char *path) {
  struct stat about;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0 || fstat(fd, &about)) die(path);
  const char *at = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
  if (at == MAP_FAILED) die(path);
  close(fd);
  memcpy(&stream_count, at, sizeof stream_count);
  at += sizeof stream_count;
  streams = grow(NULL, stream_count * sizeof *streams);
  for (uint32_t i = 0; i < stream_count; i++) {
    streams[i] = at;
    at += sizeof(uint32_t);
    for (uint32_t empty = 0, numbers[2]; empty < 2; empty += !numbers[0]) {
      memcpy(numbers, at, sizeof numbers);
      at += sizeof numbers + numbers[1];
    }
  }
}

static void load_tls(const char *path) {
#ifdef TLS
  signal(SIGPIPE, SIG_IGN); /* libssl calls write() */
  tls = SSL_CTX_new(TLS_server_method());
  SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION);
  SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  if (SSL_CTX_use_certificate_chain_file(tls, path) != 1 ||
      SSL_CTX_use_PrivateKey_file(tls, path, SSL_FILETYPE_PEM) != 1) {
    ERR_print_errors_fp(stderr);
    exit(1);
  }
#else
  fprintf(stderr, "mock_server: --tls %s: compiled without TLS\n", path);
  exit(2);
#endif
}

/* -- main -------------------------------------------------------------------------------------------------- */

static void serve(void) {
  struct epoll_event events[64];
  while (!stopping) {
    int64_t next = send_due();
    int64_t wait = next == INT64_MAX ? 100000000 : next - now_ns();
    if (wait > SPIN_NS) {
      struct timespec timeout = {wait / 1000000000, wait % 1000000000};
      struct pollfd pollee = {.fd = poll_fd, .events = POLLIN};
      if (ppoll(&pollee, 1, &timeout, NULL) <= 0) continue;
    }
    int n = epoll_wait(poll_fd, events, 64, 0);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd == listen_fd) welcome();
      else {
        if ((events[i].events & EPOLLOUT) && connections[fd].open) flush(fd);
        if ((events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && connections[fd].open) receive(fd);
      }
    }
  }
}

static double late_quantile_ms(double q) {
  uint64_t seen = 0, wanted = (uint64_t)(q * (double)tokens_sent);
  for (int i = 0; i < LATE_BUCKETS; i++)
    if ((seen += late_us[i]) > wanted) return i / 1000.0;
  return LATE_BUCKETS / 1000.0;
}

static void report(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  double cpu_s = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                 (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
  FILE *file = truth_path ? fopen(truth_path, "w") : NULL;
  if (truth_path && !file) die(truth_path);
  for (size_t i = 0; file && i < record_count; i++) {
    Record *r = &records[i];
    fprintf(file, "%s\t%lld\t%d\t%lld\t", r->id, (long long)r->arrival_ns, r->planned, (long long)r->ended_ns);
    for (int32_t k = 0; k < r->sent; k++) fprintf(file, k ? " %lld" : "%lld", (long long)r->at_ns[k]);
    fputc('\n', file);
  }
  if (file && fclose(file)) die(truth_path);
  printf("{\"requests\":%zu,\"tokens\":%llu,\"late_p50_ms\":%.3f,\"late_p99_ms\":%.3f,\"late_max_ms\":%.3f,"
         "\"blocked_sends\":%llu,\"connections\":%llu,\"resumed\":%llu,\"cpu_s\":%.3f}\n",
         record_count, (unsigned long long)tokens_sent, late_quantile_ms(0.5), late_quantile_ms(0.99),
         (double)late_max_ns / 1e6, (unsigned long long)blocked_sends, (unsigned long long)connections_opened,
         (unsigned long long)sessions_resumed, cpu_s);
  fflush(stdout);
}

static void on_signal(int number) {
  (void)number;
  stopping = 1;
}

static void usage_error(const char *argument) {
  fprintf(stderr,
          "mock_server: %s?\nusage: mock_server [--port N (0: any)] [--ttft-ms X] [--itl-ms X] [--tokens N]\n"
          "  [--stall-after-requests N --stall-s X] [--truth FILE]\n  [--tls PEM] [--streams FILE]\n",
          argument);
  exit(2);
}

int main(int argc, char **argv) {
  int port = 0;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 >= argc) usage_error(argv[i]);
    const char *name = argv[i], *value = argv[i + 1];
    if (!strcmp(name, "--port")) port = atoi(value);
    else if (!strcmp(name, "--ttft-ms")) ttft_ns = (int64_t)(atof(value) * 1e6);
    else if (!strcmp(name, "--itl-ms")) itl_ns = (int64_t)(atof(value) * 1e6);
    else if (!strcmp(name, "--tokens")) fixed_tokens = atoi(value);
    else if (!strcmp(name, "--stall-after-requests")) stall_after_requests = strtoul(value, NULL, 10);
    else if (!strcmp(name, "--stall-s")) stall_ns = (int64_t)(atof(value) * 1e9);
    else if (!strcmp(name, "--truth")) truth_path = value;
    else if (!strcmp(name, "--tls")) load_tls(value);
    else if (!strcmp(name, "--streams")) load_streams(value);
    else usage_error(name);
  }
  struct rlimit files;
  if (!getrlimit(RLIMIT_NOFILE, &files)) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  prctl(PR_SET_TIMERSLACK, 1000); /* ns; the default of 50 us would make every token late */
  struct sigaction action = {.sa_handler = on_signal};
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGINT, &action, NULL);

  listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int one = 1;
  setsockopt(listen_fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listen_fd, (struct sockaddr *)&address, sizeof address) || listen(listen_fd, 65535)) die("bind");
  socklen_t size = sizeof address;
  getsockname(listen_fd, (struct sockaddr *)&address, &size);
  poll_fd = epoll_create1(EPOLL_CLOEXEC);
  struct epoll_event event = {.events = EPOLLIN, .data.fd = listen_fd};
  epoll_ctl(poll_fd, EPOLL_CTL_ADD, listen_fd, &event);
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  serve();
  report();
  return 0;
}
