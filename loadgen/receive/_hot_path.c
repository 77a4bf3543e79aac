/* What is done for every token, compiled: loadgen/receive/hot_path.py says the same in Python and is used where this is not built.

   read_ready() reads the sockets that have something, dates what came, and notes the chunks that repeat the one before
   them. Everything else is handed to the caller. A Taker is what such chunks are known by. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define VERSION 1                       /* that of hot_path.py: raise both where what is called changes */
#define READ_BYTES 65536
#define READS_MAX 256                   /* of one call */
#define SIZE_LINE_MAX 16                /* bytes of the line with a chunk's size */
#define REPEAT_MAX_BYTES 2047           /* a longer read is parsed; repeats.READ_MAX_BYTES is one more */
#define NUMBER_MAX 24                   /* bytes of a number */
#define TOTAL_MAX 1000000000LL          /* tokens; more are read by the parsers */
#define DELAY_MAX_NS 60000000000LL      /* a stamp further off than this is no stamp of this read */
#define CLOCKS_APART_MAX_NS 20000LL     /* two clocks that are read one after the other */

static PyObject *s_receiver, *s_exchange, *s_feed, *s_last_ns, *s_total;

static long long clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* What is to be added to a time of the wall clock to have it on the monotonic one, ns. */
static long long monotonic_minus_wall_ns(void)
{
    long long before = 0, wall = 0, after = 0;
    for (int tries = 0; tries < 3; tries++) {
        before = clock_ns(CLOCK_MONOTONIC);
        wall = clock_ns(CLOCK_REALTIME);
        after = clock_ns(CLOCK_MONOTONIC);
        if (after - before < CLOCKS_APART_MAX_NS)   /* longer, and the process was interrupted */
            break;
    }
    return before + (after - before) / 2 - wall;
}

/* -- chunks that repeat ------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *before;       /* bytes between the size and the text */
    PyObject *known;        /* set of bytes: the line with the size, and all from the text on; with a form: texts */
    PyObject *note;         /* called with the time of a read that repeats */
    PyObject *otherwise;    /* called with the time and the bytes of any other */
    PyObject *form;         /* NULL, or what has the total of tokens so far */
    PyObject *fixed, *gaps; /* with a form: tuples of the bytes behind the text, and of what is added to the total */
    int upper;              /* with a form: sizes are written in capitals */
} Taker;

/* The length of the line with the size, where it and ``before`` begin the read; 0: they do not. */
static Py_ssize_t line_of(Taker *self, const char *read, Py_ssize_t length)
{
    if (length > REPEAT_MAX_BYTES)
        return 0;
    const char *end = memchr(read, '\n', length < SIZE_LINE_MAX ? (size_t)length : SIZE_LINE_MAX);
    if (end == NULL)
        return 0;
    Py_ssize_t line = end + 1 - read, before = PyBytes_GET_SIZE(self->before);
    int begins = length - line >= before && memcmp(end + 1, PyBytes_AS_STRING(self->before), before) == 0;
    return begins ? line : 0;
}

/* 1: the read is a known chunk; 0: it may be; -1: error. */
static int is_known(Taker *self, const char *read, Py_ssize_t length, Py_ssize_t line)
{
    Py_ssize_t before = PyBytes_GET_SIZE(self->before);
    PyObject *rest = PyBytes_FromStringAndSize(NULL, length - before);
    if (rest == NULL)
        return -1;
    memcpy(PyBytes_AS_STRING(rest), read, line);
    memcpy(PyBytes_AS_STRING(rest) + line, read + line + before, length - line - before);
    int found = PySet_Contains(self->known, rest);
    Py_DECREF(rest);
    return found;
}

/* What stands behind the text beside this total, into ``behind``. Its length; 0: it is too long; -1: error. */
static Py_ssize_t behind_of(Taker *self, long long total, char *behind)
{
    Py_ssize_t length = 0, pieces = PyTuple_GET_SIZE(self->fixed), totals = PyTuple_GET_SIZE(self->gaps);
    for (Py_ssize_t i = 0; i < pieces; i++) {
        char *bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(self->fixed, i), &bytes, &size) < 0)
            return -1;
        if (length + size + NUMBER_MAX > REPEAT_MAX_BYTES)
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

/* As is_known, for the chunk with the next total, which is told. */
static int is_next(Taker *self, const char *read, Py_ssize_t length, Py_ssize_t line, long long *total)
{
    char size[SIZE_LINE_MAX + 8], behind[REPEAT_MAX_BYTES];
    Py_ssize_t head = line + PyBytes_GET_SIZE(self->before);
    int written = snprintf(size, sizeof size, self->upper ? "%zX\r\n" : "%zx\r\n", (size_t)(length - line - 2));
    if (length < line + 2 || written != line || memcmp(read, size, line) != 0)
        return 0;
    PyObject *value = PyObject_GetAttr(self->form, s_total);
    *total = value == NULL ? -1 : value == Py_None ? TOTAL_MAX : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (*total == -1 && PyErr_Occurred())
        return -1;
    if (*total < 0 || *total >= TOTAL_MAX)
        return 0;
    Py_ssize_t tail = behind_of(self, ++*total, behind), text = length - head - tail;
    if (tail <= 0 || text <= 0 || memcmp(read + length - tail, behind, tail) != 0)
        return tail < 0 ? -1 : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(read + head, text);
    int found = bytes == NULL ? -1 : PySet_Contains(self->known, bytes);
    Py_XDECREF(bytes);
    return found;
}

/* Note the read if it repeats: 1; 0: it may be anything; -1: error. */
static int take(Taker *self, long long at_ns, const char *read, Py_ssize_t length)
{
    long long total = 0;
    Py_ssize_t line = self->note == NULL ? 0 : line_of(self, read, length);
    int found = !line ? 0 : self->form ? is_next(self, read, length, line, &total) : is_known(self, read, length, line);
    if (found != 1)
        return found;
    PyObject *at = PyLong_FromLongLong(at_ns);
    PyObject *done = at == NULL ? NULL : PyObject_CallOneArg(self->note, at);
    Py_XDECREF(at);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    if (self->form == NULL)
        return 1;
    PyObject *value = PyLong_FromLongLong(total);
    int error = value == NULL ? -1 : PyObject_SetAttr(self->form, s_total, value);
    Py_XDECREF(value);
    return error < 0 ? -1 : 1;
}

static PyObject *taker_call(Taker *self, PyObject *args, PyObject *kwargs)
{
    long long at_ns;
    PyObject *read;
    if (!PyArg_ParseTuple(args, "LS", &at_ns, &read))
        return NULL;
    int taken = take(self, at_ns, PyBytes_AS_STRING(read), PyBytes_GET_SIZE(read));
    if (taken < 0)
        return NULL;
    if (taken)
        Py_RETURN_FALSE;
    if (self->otherwise != NULL)
        return PyObject_Call(self->otherwise, args, NULL);
    PyErr_SetString(PyExc_ReferenceError, "what took these reads is gone");
    return NULL;
}

static int taker_traverse(Taker *self, visitproc visit, void *arg)
{
    Py_VISIT(self->known);
    Py_VISIT(self->note);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->form);
    Py_VISIT(self->fixed);
    Py_VISIT(self->gaps);
    return 0;
}

/* ``before`` and ``known`` stay: they lead nowhere, and whoever holds this may still ask it. */
static int taker_clear(Taker *self)
{
    Py_CLEAR(self->note);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->form);
    return 0;
}

static void taker_dealloc(Taker *self)
{
    PyObject_GC_UnTrack(self);
    taker_clear(self);
    Py_XDECREF(self->before);
    Py_XDECREF(self->known);
    Py_XDECREF(self->fixed);
    Py_XDECREF(self->gaps);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject TakerType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ampacity.loadgen.receive._hot_path.Taker",
    .tp_doc = "Takes reads: of one that repeats the time is noted, all others go on.",
    .tp_basicsize = sizeof(Taker),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_call = (ternaryfunc)taker_call,
    .tp_traverse = (traverseproc)taker_traverse,
    .tp_clear = (inquiry)taker_clear,
    .tp_dealloc = (destructor)taker_dealloc,
};

static PyObject *new_taker(PyObject *before, PyObject *known, PyObject *note, PyObject *otherwise, PyObject *form,
                           PyObject *fixed, PyObject *gaps, int upper)
{
    Taker *self = (Taker *)PyType_GenericAlloc(&TakerType, 0);
    if (self == NULL)
        return NULL;
    self->before = Py_NewRef(before);
    self->known = Py_NewRef(known);
    self->note = Py_NewRef(note);
    self->otherwise = Py_NewRef(otherwise);
    self->form = Py_XNewRef(form);
    self->fixed = Py_XNewRef(fixed);
    self->gaps = Py_XNewRef(gaps);
    self->upper = upper;
    return (PyObject *)self;
}

static PyObject *repeats(PyObject *module, PyObject *args)
{
    PyObject *before, *known, *note, *otherwise;
    if (!PyArg_ParseTuple(args, "SO!OO", &before, &PySet_Type, &known, &note, &otherwise))
        return NULL;
    return new_taker(before, known, note, otherwise, NULL, NULL, NULL, 0);
}

static PyObject *counting(PyObject *module, PyObject *args)
{
    PyObject *form, *before, *fixed, *gaps, *known, *note, *otherwise;
    int upper;
    if (!PyArg_ParseTuple(args, "OSO!O!pO!OO", &form, &before, &PyTuple_Type, &fixed, &PyTuple_Type, &gaps, &upper,
                          &PySet_Type, &known, &note, &otherwise))
        return NULL;
    return new_taker(before, known, note, otherwise, form, fixed, gaps, upper);
}

/* -- reads --------------------------------------------------------------------------------------- */

/* The time on the wall clock that the kernel put beside what was read, ns; 0: none. */
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

/* What takes the wire's reads, as a new reference. NULL: nobody does, or there was an error. */
static PyObject *feed_of(PyObject *wire)
{
    PyObject *receiver = PyObject_GetAttr(wire, s_receiver);
    PyObject *exchange = receiver == NULL ? NULL : PyObject_GetAttr(receiver, s_exchange);
    PyObject *feed = exchange == NULL || exchange == Py_None ? NULL : PyObject_GetAttr(exchange, s_feed);
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

/* Set the date of the wire's latest read, no earlier than the one before. The distance between them; -1: error. */
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

/* Whether the read was noted as a repetition. What fails here is tried again by the caller, which says so. */
static int noted(PyObject *wire, long long at_ns, const char *data, Py_ssize_t length)
{
    PyObject *feed = feed_of(wire);
    int found = feed != NULL && Py_TYPE(feed) == &TakerType && take((Taker *)feed, at_ns, data, length) == 1;
    Py_XDECREF(feed);
    PyErr_Clear();
    return found;
}

static PyObject *read_ready(PyObject *module, PyObject *args)
{
    PyObject *epoll, *wires, *result = NULL;
    int most;
    long long near_ns, audit_at, audit_every;
    if (!PyArg_ParseTuple(args, "OO!iLLL", &epoll, &PyList_Type, &wires, &most, &near_ns, &audit_at, &audit_every))
        return NULL;
    int epoll_fd = PyObject_AsFileDescriptor(epoll);
    if (epoll_fd < 0)
        return NULL;
    if (most < 1 || audit_every < 1) {
        PyErr_SetString(PyExc_ValueError, "at least one read, and one of so many audited");
        return NULL;
    }
    struct epoll_event events[READS_MAX];
    int ready = epoll_wait(epoll_fd, events, most < READS_MAX ? most : READS_MAX, 0);
    if (ready < 0) {
        if (errno != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
        ready = 0;
    }
    PyObject *reads = PyList_New(0), *again = PyList_New(0), *delays = PyList_New(0);
    if (reads == NULL || again == NULL || delays == NULL)
        goto done;
    long long earliest_ns = clock_ns(CLOCK_MONOTONIC) - DELAY_MAX_NS, to_monotonic_ns = monotonic_minus_wall_ns();
    int near = 0;
    char data[READ_BYTES];
    for (int i = 0; i < ready; i++) {
        int fd = events[i].data.fd;
        PyObject *wire = fd < PyList_GET_SIZE(wires) ? PyList_GET_ITEM(wires, fd) : Py_None;
        if (wire == Py_None)
            continue;
        _Alignas(struct cmsghdr) char ancillary[CMSG_SPACE(sizeof(struct timespec))];
        struct iovec into = {data, sizeof data};
        struct msghdr message = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = ancillary,
                                 .msg_controllen = sizeof ancillary};
        ssize_t length = recvmsg(fd, &message, MSG_DONTWAIT);
        int error = length < 0 ? errno : 0;
        long long now_ns = clock_ns(CLOCK_MONOTONIC), at_ns = now_ns;
        if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR)
            continue;
        Py_INCREF(wire);
        int failed = 0;
        if (error) {
            PyObject *words = PyUnicode_DecodeLocale(strerror(error), "surrogateescape");
            PyObject *why = words == NULL ? NULL : PyObject_CallFunction(PyExc_OSError, "iO", error, words);
            Py_XDECREF(words);
            failed = why == NULL || append_new(reads, Py_BuildValue("OLO", wire, at_ns, why)) < 0;
            Py_XDECREF(why);
        } else {
            long long stamp = stamp_ns(&message), stamped_ns = stamp + to_monotonic_ns;
            if (stamp && earliest_ns < stamped_ns && stamped_ns <= now_ns) {
                at_ns = stamped_ns;
                if (i % audit_every == audit_at)
                    failed = append_new(delays, PyLong_FromLongLong(now_ns - at_ns)) < 0;
            }
            /* two clocks are read one after the other, and one may be set: no later read has an earlier date */
            long long gap_ns = failed ? -1 : move_on(wire, &at_ns);
            failed = gap_ns < 0;
            /* with no stamp it has to be read at once */
            near += length > 0 && (!stamp || gap_ns < near_ns);
            if (!failed && (events[i].events != EPOLLIN || length == READ_BYTES))
                failed = PyList_Append(again, wire) < 0;
            if (!failed && !noted(wire, at_ns, data, length))
                failed = append_new(reads, Py_BuildValue("OLy#", wire, at_ns, data, (Py_ssize_t)length)) < 0;
        }
        Py_DECREF(wire);
        if (failed)
            goto done;
    }
    result = Py_BuildValue("iiOOO", ready, near, reads, again, delays);
done:
    Py_XDECREF(reads);
    Py_XDECREF(again);
    Py_XDECREF(delays);
    return result;
}

static PyMethodDef functions[] = {
    {"repeats", repeats, METH_VARARGS, "What takes reads of which many repeat; see ampacity.loadgen.receive.hot_path."},
    {"counting", counting, METH_VARARGS, "What takes reads of which many repeat and count; see ampacity.loadgen.receive.hot_path."},
    {"read_ready", read_ready, METH_VARARGS, "Read the sockets that have something; see ampacity.loadgen.receive.hot_path."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "ampacity.loadgen.receive._hot_path", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__hot_path(void)
{
    s_receiver = PyUnicode_InternFromString("receiver");
    s_exchange = PyUnicode_InternFromString("exchange");
    s_feed = PyUnicode_InternFromString("feed");
    s_last_ns = PyUnicode_InternFromString("last_ns");
    s_total = PyUnicode_InternFromString("total");
    if (!s_receiver || !s_exchange || !s_feed || !s_last_ns || !s_total || PyType_Ready(&TakerType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        Py_CLEAR(module);
    return module;
}
