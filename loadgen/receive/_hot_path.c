/* The hot path: read_ready() reads the ready sockets, dates the reads, and records the chunks that
   match the template of their answer. All other reads are returned to the caller. A ReadHandler
   matches chunks. Where this is not built, loadgen/receive/hot_path.py reads the sockets and all
   chunks are parsed. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE                     /* memmem */
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define VERSION 3                       /* as in hot_path.py: raise both with the interface */
#define READ_BYTES 65536
#define READS_MAX 256                   /* per call */
#define SIZE_DIGITS_MAX 8               /* of a chunk's size */
#define TOTAL_MAX 1000000000LL          /* tokens; larger totals are parsed */
#define DELAY_MAX_NS 60000000000LL      /* a time stamp further off does not belong to this read */
#define CLOCKS_APART_MAX_NS 20000LL     /* between two clocks read one after the other */

static PyObject *s_receiver, *s_exchange, *s_feed, *s_last_ns;

static long long clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Return the offset from the wall clock to the monotonic clock, ns. */
static long long monotonic_minus_wall_ns(void)
{
    long long before = 0, wall = 0, after = 0;
    for (int tries = 0; tries < 3; tries++) {
        before = clock_ns(CLOCK_MONOTONIC);
        wall = clock_ns(CLOCK_REALTIME);
        after = clock_ns(CLOCK_MONOTONIC);
        if (after - before < CLOCKS_APART_MAX_NS)   /* else the process was interrupted */
            break;
    }
    return before + (after - before) / 2 - wall;
}

/* -- chunks that match a template ---------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *before;       /* bytes of an event before its text */
    PyObject *fixed, *gaps; /* tuples: the bytes after the text, and the running totals between
                               them, less the first one */
    PyObject *marks;        /* tuple of bytes: a text that holds one is parsed */
    PyObject *add_time;     /* called with the time of the read of each matching chunk */
    PyObject *add_total;    /* called with its running total, where there are ``gaps`` */
    PyObject *add_text;     /* NULL, or called with its text as written in JSON */
    PyObject *fallback;     /* called with time and bytes of all that does not match */
    long long total;        /* the latest running total of tokens */
} ReadHandler;

typedef struct {
    const char *text;
    Py_ssize_t text_bytes;
    long long total;
} Chunk;

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Return the code unit of the JSON escape (u and four digits) at ``at``, -1 if it is none. */
static int unit_of(const char *at, const char *end)
{
    int unit = 0;
    if (end - at < 6 || at[0] != '\\' || at[1] != 'u')
        return -1;
    for (int i = 2; i < 6; i++) {
        int digit = hex_digit(at[i]);
        if (digit < 0)
            return -1;
        unit = unit << 4 | digit;
    }
    return unit;
}

/* Return the end of the escape at ``at``; NULL if it is none, or may be a part of a mark. */
static const char *after_escape(const char *at, const char *end)
{
    if (end - at >= 2 && strchr("\"\\bfnrt", at[1]) != NULL && at[1] != 0)
        return at + 2;
    int unit = unit_of(at, end);
    if (unit < 0x80 || unit == 0x25B7 || unit == 0x25C1 || (unit & 0xFC00) == 0xDC00)
        return NULL;
    if ((unit & 0xFC00) != 0xD800)
        return at + 6;
    return (unit_of(at + 6, end) & ~0x3FF) == 0xDC00 ? at + 12 : NULL; /* a pair */
}

/* Return the end of a JSON string's text; NULL if it is empty or has to be parsed. */
static const char *end_of_text(ReadHandler *self, const char *text, const char *end)
{
    const char *at = text;
    int ascii = 1;
    while (at < end && *at != '"') {
        if ((unsigned char)*at < 0x20)
            return NULL;
        ascii &= (unsigned char)*at < 0x80;
        if ((at = *at == '\\' ? after_escape(at, end) : at + 1) == NULL)
            return NULL;
    }
    if (at >= end || at == text)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->marks); i++) {
        PyObject *mark = PyTuple_GET_ITEM(self->marks, i);
        if (PyBytes_GET_SIZE(mark) <= at - text
            && memmem(text, at - text, PyBytes_AS_STRING(mark), PyBytes_GET_SIZE(mark)))
            return NULL;
    }
    if (!ascii) {
        PyObject *decoded = PyUnicode_DecodeUTF8(text, at - text, NULL);
        if (decoded == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_DECREF(decoded);
    }
    return at;
}

/* Return the end of the bytes at ``at``, NULL if they are others. */
static const char *after_bytes(PyObject *bytes, const char *at, const char *end)
{
    Py_ssize_t size = PyBytes_GET_SIZE(bytes);
    return end - at >= size && memcmp(at, PyBytes_AS_STRING(bytes), size) == 0 ? at + size : NULL;
}

/* Read the running total at ``at``, less ``gap``. Return its end; NULL if it does not rise, or is
   another than the one before. */
static const char *after_total(ReadHandler *self, long long gap, const char *at, const char *end,
                               long long *total)
{
    long long number = 0;
    const char *begin = at;
    for (; at < end && *at >= '0' && *at <= '9' && number < TOTAL_MAX; at++)
        number = number * 10 + (*at - '0');
    if (at == begin || *begin == '0' || number >= TOTAL_MAX || number - gap <= self->total
        || (*total && *total != number - gap))
        return NULL;
    *total = number - gap;
    return at;
}

/* Return the length of the HTTP chunk that the read begins with; 0 if it does not match. */
static Py_ssize_t match(ReadHandler *self, const char *read, Py_ssize_t length, Chunk *chunk)
{
    const char *at = read, *end = read + length;
    Py_ssize_t size = 0;
    for (int digit; at < end && at - read < SIZE_DIGITS_MAX && (digit = hex_digit(*at)) >= 0; at++)
        size = size << 4 | digit;
    if (end - at < size + 4 || memcmp(at, "\r\n", 2) || memcmp(at + 2 + size, "\r\n", 2))
        return 0;
    end = at + 2 + size;
    if ((chunk->text = at = after_bytes(self->before, at + 2, end)) == NULL
        || (at = end_of_text(self, at, end)) == NULL)
        return 0;
    chunk->text_bytes = at - chunk->text;
    chunk->total = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->fixed); i++) {
        if ((at = after_bytes(PyTuple_GET_ITEM(self->fixed, i), at, end)) == NULL)
            return 0;
        if (i < PyTuple_GET_SIZE(self->gaps)) {
            long long gap = PyLong_AsLongLong(PyTuple_GET_ITEM(self->gaps, i));
            if ((at = after_total(self, gap, at, end, &chunk->total)) == NULL)
                return 0;
        }
    }
    return at == end ? end + 2 - read : 0;
}

/* Call ``function`` with a new reference, which is taken. Return -1 on error. */
static int call(PyObject *function, PyObject *argument)
{
    PyObject *done = argument == NULL ? NULL : PyObject_CallOneArg(function, argument);
    Py_XDECREF(argument);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Record the chunks that the read begins with. Return their length, -1 on error. */
static Py_ssize_t handle(ReadHandler *self, long long at_ns, const char *read, Py_ssize_t length)
{
    Py_ssize_t done = 0, size;
    Chunk chunk;
    while (self->add_time != NULL
           && (size = match(self, read + done, length - done, &chunk)) > 0) {
        if (call(self->add_time, PyLong_FromLongLong(at_ns)) < 0)
            return -1;
        if (self->add_text != NULL
            && call(self->add_text, PyBytes_FromStringAndSize(chunk.text, chunk.text_bytes)) < 0)
            return -1;
        if (chunk.total && call(self->add_total, PyLong_FromLongLong(chunk.total)) < 0)
            return -1;
        self->total = chunk.total;
        done += size;
    }
    return done;
}

static PyObject *handler_call(ReadHandler *self, PyObject *args, PyObject *kwargs)
{
    long long at_ns;
    PyObject *read;
    if (!PyArg_ParseTuple(args, "LS", &at_ns, &read))
        return NULL;
    Py_ssize_t length = PyBytes_GET_SIZE(read);
    Py_ssize_t done = handle(self, at_ns, PyBytes_AS_STRING(read), length);
    if (done < 0)
        return NULL;
    if (done && done == length)
        Py_RETURN_FALSE;
    if (self->fallback != NULL)
        return PyObject_CallFunction(self->fallback, "Ly#", at_ns, PyBytes_AS_STRING(read) + done,
                                     length - done);
    PyErr_SetString(PyExc_ReferenceError, "the handler of these reads is gone");
    return NULL;
}

static int handler_traverse(ReadHandler *self, visitproc visit, void *arg)
{
    Py_VISIT(self->fixed);
    Py_VISIT(self->gaps);
    Py_VISIT(self->marks);
    Py_VISIT(self->add_time);
    Py_VISIT(self->add_total);
    Py_VISIT(self->add_text);
    Py_VISIT(self->fallback);
    return 0;
}

/* Only what can be in a cycle: a holder may still call this. */
static int handler_clear(ReadHandler *self)
{
    Py_CLEAR(self->add_time);
    Py_CLEAR(self->add_total);
    Py_CLEAR(self->add_text);
    Py_CLEAR(self->fallback);
    return 0;
}

static void handler_dealloc(ReadHandler *self)
{
    PyObject_GC_UnTrack(self);
    handler_clear(self);
    Py_XDECREF(self->before);
    Py_XDECREF(self->fixed);
    Py_XDECREF(self->gaps);
    Py_XDECREF(self->marks);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject ReadHandlerType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ampacity.loadgen.receive._hot_path.ReadHandler",
    .tp_doc = "Record the time of matching reads, pass on all others.",
    .tp_basicsize = sizeof(ReadHandler),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_call = (ternaryfunc)handler_call,
    .tp_traverse = (traverseproc)handler_traverse,
    .tp_clear = (inquiry)handler_clear,
    .tp_dealloc = (destructor)handler_dealloc,
};

static PyObject *read_handler(PyObject *module, PyObject *args)
{
    ReadHandler h = {0};
    if (!PyArg_ParseTuple(args, "SO!O!O!OOOOL", &h.before, &PyTuple_Type, &h.fixed, &PyTuple_Type,
                          &h.gaps, &PyTuple_Type, &h.marks, &h.add_time, &h.add_total, &h.add_text,
                          &h.fallback, &h.total))
        return NULL;
    ReadHandler *self = (ReadHandler *)PyType_GenericAlloc(&ReadHandlerType, 0);
    if (self == NULL)
        return NULL;
    self->before = Py_NewRef(h.before);
    self->fixed = Py_NewRef(h.fixed);
    self->gaps = Py_NewRef(h.gaps);
    self->marks = Py_NewRef(h.marks);
    self->add_time = Py_NewRef(h.add_time);
    self->add_total = Py_NewRef(h.add_total);
    self->add_text = h.add_text == Py_None ? NULL : Py_NewRef(h.add_text);
    self->fallback = Py_NewRef(h.fallback);
    self->total = h.total;
    return (PyObject *)self;
}

/* -- reads --------------------------------------------------------------------------------- */

/* Return the kernel's time stamp of the read on the wall clock, ns; 0 where there is none. */
static long long stamp_ns(struct msghdr *message)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_TIMESTAMPNS
            && c->cmsg_len >= CMSG_LEN(sizeof(struct timespec))) {
            struct timespec t;
            memcpy(&t, CMSG_DATA(c), sizeof t);
            return t.tv_sec * 1000000000LL + t.tv_nsec;
        }
    return 0;
}

/* Return the handler of the wire's reads, a new reference; NULL where there is none or on error. */
static PyObject *feed_of(PyObject *wire)
{
    PyObject *receiver = PyObject_GetAttr(wire, s_receiver);
    PyObject *exchange = receiver == NULL ? NULL : PyObject_GetAttr(receiver, s_exchange);
    PyObject *feed = NULL;
    if (exchange != NULL && exchange != Py_None)
        feed = PyObject_GetAttr(exchange, s_feed);
    Py_XDECREF(receiver);
    Py_XDECREF(exchange);
    return feed;
}

static int append_new(PyObject *list, PyObject *item)
{
    int error = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return error;
}

/* Set the time of the wire's latest read, no earlier than the previous one. Return the gap, ns;
   -1 on error. */
static long long move_on(PyObject *wire, long long *at_ns)
{
    PyObject *value = PyObject_GetAttr(wire, s_last_ns);
    long long gap, last = value == NULL ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (last == -1 && PyErr_Occurred())
        return -1;
    gap = *at_ns - last;
    if (gap < 0) {
        *at_ns = last;
        gap = 0;
    }
    value = PyLong_FromLongLong(*at_ns);
    int error = value == NULL ? -1 : PyObject_SetAttr(wire, s_last_ns, value);
    Py_XDECREF(value);
    return error < 0 ? -1 : gap;
}

/* Record the chunks that the read begins with; return their length. After an error the caller
   handles the read again and reports it. */
static Py_ssize_t recorded(PyObject *wire, long long at_ns, const char *data, Py_ssize_t length)
{
    PyObject *feed = feed_of(wire);
    Py_ssize_t done = 0;
    if (feed != NULL && Py_TYPE(feed) == &ReadHandlerType)
        done = handle((ReadHandler *)feed, at_ns, data, length);
    Py_XDECREF(feed);
    PyErr_Clear();
    return done < 0 ? 0 : done;
}

/* What read_ready() collects. */
typedef struct {
    PyObject *reads, *again, *delays;
    int near;
} Results;

/* The times of one turn, and which reads are audited. */
typedef struct {
    long long earliest_ns, to_monotonic_ns, near_ns;
    int audit, by_kernel;
} Turn;

static int add_error(Results *results, PyObject *wire, long long at_ns, int error)
{
    PyObject *text = PyUnicode_DecodeLocale(strerror(error), "surrogateescape");
    PyObject *exception = text == NULL ? NULL
                                       : PyObject_CallFunction(PyExc_OSError, "iO", error, text);
    Py_XDECREF(text);
    if (exception == NULL)
        return -1;
    int failed = append_new(results->reads, Py_BuildValue("OLO", wire, at_ns, exception));
    Py_DECREF(exception);
    return failed;
}

/* Read the socket once, date the read, record or append it. Return -1 on error. */
static int read_one(PyObject *wire, const struct epoll_event *event, const Turn *turn,
                    char *data, Results *results)
{
    _Alignas(struct cmsghdr) char ancillary[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec into = {data, READ_BYTES};
    struct msghdr message = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = ancillary,
                             .msg_controllen = sizeof ancillary};
    ssize_t length = recvmsg(event->data.fd, &message, MSG_DONTWAIT);
    int error = length < 0 ? errno : 0;
    long long now_ns = clock_ns(CLOCK_MONOTONIC), at_ns = now_ns;
    if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR)
        return 0;
    if (error)
        return add_error(results, wire, at_ns, error);
    long long stamp = stamp_ns(&message), stamped_ns = stamp + turn->to_monotonic_ns;
    if (stamp && turn->earliest_ns < stamped_ns && stamped_ns <= now_ns) {
        if (turn->by_kernel)
            at_ns = stamped_ns;
        if (turn->audit
            && append_new(results->delays, PyLong_FromLongLong(now_ns - stamped_ns)) < 0)
            return -1;
    }
    /* two clocks are read in turn, and one may be set: times of a stream never go back */
    long long gap_ns = move_on(wire, &at_ns);
    if (gap_ns < 0)
        return -1;
    /* without a time stamp it has to be read at once */
    results->near += length > 0 && (!stamp || gap_ns < turn->near_ns);
    if ((event->events != EPOLLIN || length == READ_BYTES)
        && PyList_Append(results->again, wire) < 0)
        return -1;
    Py_ssize_t done = recorded(wire, at_ns, data, length);
    if (done && done == length)
        return 0;
    return append_new(results->reads,
                      Py_BuildValue("OLy#", wire, at_ns, data + done, (Py_ssize_t)length - done));
}

static PyObject *read_ready(PyObject *module, PyObject *args)
{
    PyObject *epoll, *wires, *result = NULL;
    int most, by_kernel;
    long long near_ns, audit_at, audit_every;
    if (!PyArg_ParseTuple(args, "OO!iLLLp", &epoll, &PyList_Type, &wires, &most, &near_ns,
                          &audit_at, &audit_every, &by_kernel))
        return NULL;
    int epoll_fd = PyObject_AsFileDescriptor(epoll);
    if (epoll_fd < 0)
        return NULL;
    if (most < 1 || audit_every < 1) {
        PyErr_SetString(PyExc_ValueError, "most and audit_every must be at least 1");
        return NULL;
    }
    struct epoll_event events[READS_MAX];
    int ready = epoll_wait(epoll_fd, events, most < READS_MAX ? most : READS_MAX, 0);
    if (ready < 0) {
        if (errno != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
        ready = 0;
    }
    Results results = {PyList_New(0), PyList_New(0), PyList_New(0), 0};
    if (results.reads == NULL || results.again == NULL || results.delays == NULL)
        goto done;
    Turn turn = {.earliest_ns = clock_ns(CLOCK_MONOTONIC) - DELAY_MAX_NS,
                 .to_monotonic_ns = monotonic_minus_wall_ns(), .near_ns = near_ns,
                 .by_kernel = by_kernel};
    char data[READ_BYTES];
    for (int i = 0; i < ready; i++) {
        int fd = events[i].data.fd;
        PyObject *wire = fd < PyList_GET_SIZE(wires) ? PyList_GET_ITEM(wires, fd) : Py_None;
        if (wire == Py_None)
            continue;
        turn.audit = i % audit_every == audit_at;
        Py_INCREF(wire);
        int failed = read_one(wire, &events[i], &turn, data, &results);
        Py_DECREF(wire);
        if (failed < 0)
            goto done;
    }
    result = Py_BuildValue("iiOOO", ready, results.near, results.reads, results.again,
                           results.delays);
done:
    Py_XDECREF(results.reads);
    Py_XDECREF(results.again);
    Py_XDECREF(results.delays);
    return result;
}

static PyMethodDef functions[] = {
    {"read_handler", read_handler, METH_VARARGS, "Return a handler of reads; see the .pyi file."},
    {"read_ready", read_ready, METH_VARARGS, "Read the ready sockets; see hot_path.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ampacity.loadgen.receive._hot_path",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__hot_path(void)
{
    s_receiver = PyUnicode_InternFromString("receiver");
    s_exchange = PyUnicode_InternFromString("exchange");
    s_feed = PyUnicode_InternFromString("feed");
    s_last_ns = PyUnicode_InternFromString("last_ns");
    if (!s_receiver || !s_exchange || !s_feed || !s_last_ns || PyType_Ready(&ReadHandlerType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        Py_CLEAR(module);
    return module;
}
