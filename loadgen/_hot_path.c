/* What is done for every token, compiled: loadgen/hot_path.py says the same in Python and is used where this is not built.

   read_ready() reads the sockets that have something, dates what came, and notes the chunks that repeat the one before
   them. Everything else is handed to the caller. Repeats is what it knows such chunks by. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define READ_BYTES 65536
#define READS_MAX 256                   /* of one call */
#define SIZE_LINE_MAX 16                /* bytes of the line with a chunk's size */
#define REPEAT_MAX_BYTES 4096           /* a longer read repeats nothing; repeats.READ_MAX_BYTES is below it */
#define DELAY_MAX_NS 60000000000LL      /* a stamp further off than this is no stamp of this read */
#define CLOCKS_APART_MAX_NS 20000LL     /* two clocks that are read one after the other */

static PyObject *s_receiver, *s_exchange, *s_feed, *s_last_ns;

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
    PyObject *known;        /* set of bytes: the line with the size, and all from the text on */
    PyObject *note;         /* called with the time of a read that repeats */
    PyObject *otherwise;    /* called with the time and the bytes of any other */
} Repeats;

/* 1: what was read is such a chunk; 0: it may be; -1: error. */
static int repeats_matches(Repeats *self, const char *read, Py_ssize_t length)
{
    if (length > REPEAT_MAX_BYTES)
        return 0;
    const char *line_end = memchr(read, '\n', length < SIZE_LINE_MAX ? (size_t)length : SIZE_LINE_MAX);
    if (line_end == NULL)
        return 0;
    Py_ssize_t line = line_end + 1 - read, before = PyBytes_GET_SIZE(self->before);
    if (length - line < before || memcmp(line_end + 1, PyBytes_AS_STRING(self->before), before) != 0)
        return 0;
    PyObject *rest = PyBytes_FromStringAndSize(NULL, length - before);
    if (rest == NULL)
        return -1;
    memcpy(PyBytes_AS_STRING(rest), read, line);
    memcpy(PyBytes_AS_STRING(rest) + line, line_end + 1 + before, length - line - before);
    int found = PySet_Contains(self->known, rest);
    Py_DECREF(rest);
    return found;
}

static int repeats_note(Repeats *self, long long at_ns)
{
    PyObject *at = PyLong_FromLongLong(at_ns);
    PyObject *none = at == NULL ? NULL : PyObject_CallOneArg(self->note, at);
    Py_XDECREF(at);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

static PyObject *repeats_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"before", "known", "note", "otherwise", NULL};
    PyObject *before, *known, *note, *otherwise;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "SO!OO", names, &before, &PySet_Type, &known, &note, &otherwise))
        return NULL;
    Repeats *self = (Repeats *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->before = Py_NewRef(before);
    self->known = Py_NewRef(known);
    self->note = Py_NewRef(note);
    self->otherwise = Py_NewRef(otherwise);
    return (PyObject *)self;
}

static PyObject *repeats_call(Repeats *self, PyObject *args, PyObject *kwargs)
{
    long long at_ns;
    const char *read;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Ly#", &at_ns, &read, &length))
        return NULL;
    switch (repeats_matches(self, read, length)) {
    case 0:
        return PyObject_Call(self->otherwise, args, NULL);
    case 1:
        if (repeats_note(self, at_ns) == 0)
            Py_RETURN_FALSE;
    }
    return NULL;
}

static int repeats_traverse(Repeats *self, visitproc visit, void *arg)
{
    Py_VISIT(self->known);
    Py_VISIT(self->note);
    Py_VISIT(self->otherwise);
    return 0;
}

static int repeats_clear(Repeats *self)
{
    Py_CLEAR(self->before);
    Py_CLEAR(self->known);
    Py_CLEAR(self->note);
    Py_CLEAR(self->otherwise);
    return 0;
}

static void repeats_dealloc(Repeats *self)
{
    PyObject_GC_UnTrack(self);
    repeats_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject RepeatsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "loadgen._hot_path.Repeats",
    .tp_doc = "Takes reads: of one that is a known chunk the time is noted, all others go on.",
    .tp_basicsize = sizeof(Repeats),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = repeats_new,
    .tp_call = (ternaryfunc)repeats_call,
    .tp_traverse = (traverseproc)repeats_traverse,
    .tp_clear = (inquiry)repeats_clear,
    .tp_dealloc = (destructor)repeats_dealloc,
};

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
    int found = feed != NULL && Py_TYPE(feed) == &RepeatsType
        && repeats_matches((Repeats *)feed, data, length) == 1 && repeats_note((Repeats *)feed, at_ns) == 0;
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
        char ancillary[CMSG_SPACE(sizeof(struct timespec))];
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
            PyObject *why = PyObject_CallFunction(PyExc_OSError, "is", error, strerror(error));
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
    {"read_ready", read_ready, METH_VARARGS, "Read the sockets that have something; see loadgen.hot_path."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "loadgen._hot_path", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__hot_path(void)
{
    s_receiver = PyUnicode_InternFromString("receiver");
    s_exchange = PyUnicode_InternFromString("exchange");
    s_feed = PyUnicode_InternFromString("feed");
    s_last_ns = PyUnicode_InternFromString("last_ns");
    if (!s_receiver || !s_exchange || !s_feed || !s_last_ns || PyType_Ready(&RepeatsType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Repeats", (PyObject *)&RepeatsType) < 0)
        Py_CLEAR(module);
    return module;
}
