/* The hot path: read_ready() reads the ready sockets, dates the reads, and records the chunks that
   match the template of their answer. All other reads are returned to the caller. Where this is
   not built, loadgen/receive/hot_path.py reads the sockets and all chunks are parsed. */
#include "_read_handler.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define VERSION 6                       /* as in hot_path.py: raise both with the interface */
#define READ_BYTES 65536
#define READS_MAX 256                   /* per call */
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

/* Return the compiled handler of the receiver's reads, a new reference; NULL where there is none,
   or on error. */
static ReadHandler *handler_of(PyObject *receiver)
{
    PyObject *exchange = receiver == NULL ? NULL : PyObject_GetAttr(receiver, s_exchange);
    PyObject *feed = NULL;
    if (exchange != NULL && exchange != Py_None)
        feed = PyObject_GetAttr(exchange, s_feed);
    if (feed != NULL && Py_TYPE(feed) != &ReadHandlerType)
        Py_CLEAR(feed);
    Py_XDECREF(exchange);
    return (ReadHandler *)feed;
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

/* Return the exception that was raised, a new reference. */
static PyObject *raised(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
}

/* Return the number of records of data that the read consists of; 0 if it is anything else. */
static int records_in(const unsigned char *data, Py_ssize_t length)
{
    int records = 0;
    Py_ssize_t at = 0;
    for (; length - at >= 5 && data[at] == 23; at += 5 + (data[at + 3] << 8 | data[at + 4]))
        records++;
    return at == length ? records : 0;
}

/* Decrypt, in place, and record a read of whole records. Return 0 if it is none; else ``*rest`` is
   NULL, or (plain text, its last piece or an exception) for the fallback. */
static int decrypted(ReadHandler *tls, long long at_ns, char *data, Py_ssize_t length,
                     PyObject **rest)
{
    int records = records_in((const unsigned char *)data, length);
    ReadHandler *handler = records ? handler_of(tls->receiver) : NULL;
    if (handler == NULL)
        return 0;
    PyObject *piece = NULL;
    Py_ssize_t size = 0, done, left = 0;
    int ok = call(tls->write, PyBytes_FromStringAndSize(data, length)) == 0;
    for (; ok && records; records--) {
        PyObject *most = PyLong_FromSsize_t(length - size);
        Py_XSETREF(piece, most == NULL ? NULL : PyObject_CallOneArg(tls->read, most));
        Py_XDECREF(most);
        left = piece == NULL ? 0 : PyBytes_GET_SIZE(piece);
        ok = left > 0;
        if (ok)
            memcpy(data + size, PyBytes_AS_STRING(piece), left);
        size += left;
    }
    if (!ok && piece == NULL)
        piece = raised();
    done = handle(handler, at_ns, data, size);
    if (done < 0) {
        PyErr_Clear();
        done = 0;
    }
    if (!ok || done < size)
        *rest = Py_BuildValue("(y#O)", data + done, size - done, piece);
    Py_XDECREF(piece);
    Py_DECREF(handler);
    return 1;
}

/* Record what the read begins with; return the rest, a new reference: bytes, or as decrypted().
   NULL: nothing is left. After an error the caller handles the read again and reports it. */
static PyObject *recorded(PyObject *wire, long long at_ns, char *data, Py_ssize_t length)
{
    PyObject *receiver = PyObject_GetAttr(wire, s_receiver), *rest = NULL;
    ReadHandler *handler = handler_of(receiver);
    Py_ssize_t done = 0;
    int is_tls = handler != NULL && handler->write != NULL;
    if (is_tls && decrypted(handler, at_ns, data, length, &rest))
        done = length;
    else if (handler != NULL && !is_tls)
        done = handle(handler, at_ns, data, length);
    Py_XDECREF(receiver);
    Py_XDECREF(handler);
    PyErr_Clear();
    if (done < 0)
        done = 0;
    if (done == 0 || done < length)
        rest = PyBytes_FromStringAndSize(data + done, length - done);
    return rest;
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
    PyObject *rest = recorded(wire, at_ns, data, length);
    if (rest == NULL)
        return PyErr_Occurred() ? -1 : 0;
    return append_new(results->reads, Py_BuildValue("OLN", wire, at_ns, rest));
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
    {"tls_handler", tls_handler, METH_VARARGS, "Return a handler of TLS; see the .pyi file."},
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
