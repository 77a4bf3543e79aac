/* The hot path: read_ready() reads the ready sockets, dates the reads, and records the chunks that
   match the template of their answer. All other reads are returned to the caller. A ReadHandler
   matches chunks. Where this is not built, loadgen/receive/hot_path.py reads the sockets and all
   chunks are parsed. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define VERSION 2                       /* as in hot_path.py: raise both with the interface */
#define READ_BYTES 65536
#define READS_MAX 256                   /* per call */
#define SIZE_LINE_MAX 16                /* bytes of a chunk's size line */
#define READ_MAX_BYTES 2047             /* longer ones are parsed; as in repeats.py */
#define NUMBER_MAX 24                   /* bytes of a decimal number */
#define TOTAL_MAX 1000000000LL          /* tokens; larger totals are parsed */
#define DELAY_MAX_NS 60000000000LL      /* a time stamp further off does not belong to this read */
#define CLOCKS_APART_MAX_NS 20000LL     /* between two clocks read one after the other */

static PyObject *s_receiver, *s_exchange, *s_feed, *s_last_ns, *s_total;

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
    PyObject *template;     /* its ``total`` is the running total of tokens, None where none runs */
    PyObject *before;       /* bytes between size line and text */
    PyObject *fixed, *gaps; /* tuples: the bytes after the text, and what is added to the next total
                               between them */
    PyObject *known;        /* set of texts, bytes */
    PyObject *add_time;     /* called with the time of a matching read */
    PyObject *add_text;     /* NULL, or called with its text */
    PyObject *fallback;     /* called with time and bytes of any other read */
    int upper;              /* sizes are upper-case hex */
} ReadHandler;

/* Return whether the first ``line`` bytes are the size line of a chunk with ``data`` bytes. */
static int is_size_line(const char *read, Py_ssize_t line, Py_ssize_t data, int upper)
{
    const char *digits = upper ? "0123456789ABCDEF" : "0123456789abcdef";
    if (line < 3 || data <= 0 || read[0] == '0' || read[line - 2] != '\r')
        return 0;
    for (Py_ssize_t i = line - 3; i >= 0; i--, data >>= 4)
        if (read[i] != digits[data & 15])
            return 0;
    return data == 0;
}

/* Write what follows the text at this total into ``behind``. Return its length, 0 if it is too
   long, -1 on error. */
static Py_ssize_t behind_of(ReadHandler *self, long long total, char *behind)
{
    Py_ssize_t length = 0, pieces = PyTuple_GET_SIZE(self->fixed);
    Py_ssize_t totals = PyTuple_GET_SIZE(self->gaps);
    for (Py_ssize_t i = 0; i < pieces; i++) {
        char *bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(self->fixed, i), &bytes, &size) < 0)
            return -1;
        if (length + size + NUMBER_MAX > READ_MAX_BYTES)
            return 0;
        memcpy(behind + length, bytes, size);
        length += size;
        if (i < totals) {
            long long gap = PyLong_AsLongLong(PyTuple_GET_ITEM(self->gaps, i));
            if (gap == -1 && PyErr_Occurred())
                return -1;
            length += snprintf(behind + length, NUMBER_MAX, "%lld", total + gap);
        }
    }
    return length;
}

/* Return the total of the next chunk, 0 if it is none or too large, -1 on error. */
static long long next_total(ReadHandler *self)
{
    PyObject *value = PyObject_GetAttr(self->template, s_total);
    long long total = value == NULL ? -1 : value == Py_None ? TOTAL_MAX : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (total == -1 && PyErr_Occurred())
        return -1;
    return total < 0 || total >= TOTAL_MAX ? 0 : total + 1;
}

/* Return the text of the read if it is the next chunk and the text is known; else NULL, which may
   be an error. Store the next total. */
static PyObject *text_of(ReadHandler *self, const char *read, Py_ssize_t length, long long *total)
{
    char behind[READ_MAX_BYTES];
    const char *end = memchr(read, '\n', length < SIZE_LINE_MAX ? (size_t)length : SIZE_LINE_MAX);
    if (end == NULL || length > READ_MAX_BYTES)
        return NULL;
    Py_ssize_t line = end + 1 - read, before = PyBytes_GET_SIZE(self->before);
    if (!is_size_line(read, line, length - line - 2, self->upper) || length - line < before
        || memcmp(end + 1, PyBytes_AS_STRING(self->before), before) != 0)
        return NULL;
    if (PyTuple_GET_SIZE(self->gaps) && (*total = next_total(self)) <= 0)
        return NULL;
    Py_ssize_t tail = behind_of(self, *total, behind), text = length - line - before - tail;
    if (tail <= 0 || text <= 0 || memcmp(read + length - tail, behind, tail) != 0)
        return NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(read + line + before, text);
    if (bytes != NULL && PySet_Contains(self->known, bytes) != 1)
        Py_CLEAR(bytes);
    return bytes;
}

/* Call ``function`` with a new reference, which is taken. Return -1 on error. */
static int call(PyObject *function, PyObject *argument)
{
    PyObject *done = argument == NULL ? NULL : PyObject_CallOneArg(function, argument);
    Py_XDECREF(argument);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Record the read if it matches: return 1; 0 if it does not, -1 on error. */
static int handle(ReadHandler *self, long long at_ns, const char *read, Py_ssize_t length)
{
    long long total = 0;
    PyObject *text = self->add_time == NULL ? NULL : text_of(self, read, length, &total);
    if (text == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int error = call(self->add_time, PyLong_FromLongLong(at_ns));
    if (error == 0 && self->add_text != NULL)
        error = call(self->add_text, Py_NewRef(text));
    Py_DECREF(text);
    if (error == 0 && total) {
        PyObject *value = PyLong_FromLongLong(total);
        error = value == NULL ? -1 : PyObject_SetAttr(self->template, s_total, value);
        Py_XDECREF(value);
    }
    return error < 0 ? -1 : 1;
}

static PyObject *handler_call(ReadHandler *self, PyObject *args, PyObject *kwargs)
{
    long long at_ns;
    PyObject *read;
    if (!PyArg_ParseTuple(args, "LS", &at_ns, &read))
        return NULL;
    int taken = handle(self, at_ns, PyBytes_AS_STRING(read), PyBytes_GET_SIZE(read));
    if (taken < 0)
        return NULL;
    if (taken)
        Py_RETURN_FALSE;
    if (self->fallback != NULL)
        return PyObject_Call(self->fallback, args, NULL);
    PyErr_SetString(PyExc_ReferenceError, "the handler of these reads is gone");
    return NULL;
}

static int handler_traverse(ReadHandler *self, visitproc visit, void *arg)
{
    Py_VISIT(self->template);
    Py_VISIT(self->fixed);
    Py_VISIT(self->gaps);
    Py_VISIT(self->known);
    Py_VISIT(self->add_time);
    Py_VISIT(self->add_text);
    Py_VISIT(self->fallback);
    return 0;
}

/* Only what can be in a cycle: a holder may still call this. */
static int handler_clear(ReadHandler *self)
{
    Py_CLEAR(self->template);
    Py_CLEAR(self->add_time);
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
    Py_XDECREF(self->known);
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
    if (!PyArg_ParseTuple(args, "OpSO!O!O!OOO", &h.template, &h.upper, &h.before,
                          &PyTuple_Type, &h.fixed, &PyTuple_Type, &h.gaps, &PySet_Type, &h.known,
                          &h.add_time, &h.add_text, &h.fallback))
        return NULL;
    ReadHandler *self = (ReadHandler *)PyType_GenericAlloc(&ReadHandlerType, 0);
    if (self == NULL)
        return NULL;
    self->template = Py_NewRef(h.template);
    self->before = Py_NewRef(h.before);
    self->fixed = Py_NewRef(h.fixed);
    self->gaps = Py_NewRef(h.gaps);
    self->known = Py_NewRef(h.known);
    self->add_time = Py_NewRef(h.add_time);
    self->add_text = h.add_text == Py_None ? NULL : Py_NewRef(h.add_text);
    self->fallback = Py_NewRef(h.fallback);
    self->upper = h.upper;
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

/* Return whether the read matched and was recorded. After an error the caller handles the read
   again and reports it. */
static int recorded(PyObject *wire, long long at_ns, const char *data, Py_ssize_t length)
{
    PyObject *feed = feed_of(wire);
    int found = feed != NULL && Py_TYPE(feed) == &ReadHandlerType
                && handle((ReadHandler *)feed, at_ns, data, length) == 1;
    Py_XDECREF(feed);
    PyErr_Clear();
    return found;
}

/* What read_ready() collects. */
typedef struct {
    PyObject *reads, *again, *delays;
    int near;
} Results;

/* The times of one turn, and which reads are audited. */
typedef struct {
    long long earliest_ns, to_monotonic_ns, near_ns;
    int audit;
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
        at_ns = stamped_ns;
        if (turn->audit && append_new(results->delays, PyLong_FromLongLong(now_ns - at_ns)) < 0)
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
    if (recorded(wire, at_ns, data, length))
        return 0;
    return append_new(results->reads,
                      Py_BuildValue("OLy#", wire, at_ns, data, (Py_ssize_t)length));
}

static PyObject *read_ready(PyObject *module, PyObject *args)
{
    PyObject *epoll, *wires, *result = NULL;
    int most;
    long long near_ns, audit_at, audit_every;
    if (!PyArg_ParseTuple(args, "OO!iLLL", &epoll, &PyList_Type, &wires, &most, &near_ns, &audit_at,
                          &audit_every))
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
                 .to_monotonic_ns = monotonic_minus_wall_ns(), .near_ns = near_ns};
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
    s_total = PyUnicode_InternFromString("total");
    if (!s_receiver || !s_exchange || !s_feed || !s_last_ns || !s_total
        || PyType_Ready(&ReadHandlerType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        Py_CLEAR(module);
    return module;
}
