/* Handlers of reads for _hot_path.c: one matches the chunks of an answer with their template and
   records them, one holds what decrypts the records of TLS. */
#ifndef READ_HANDLER_H
#define READ_HANDLER_H

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE                     /* memmem */
#include <Python.h>

#include "_json_values.h"

#include <string.h>

#define SIZE_DIGITS_MAX 8               /* of a chunk's size */
#define TOTAL_MAX 1000000000LL          /* tokens; larger totals are parsed */

typedef struct {
    PyObject_HEAD
    PyObject *before;       /* bytes of an event before its text */
    PyObject *fixed, *gaps; /* tuples: the bytes after the text, and what is between them: the
                               running totals, less the first one, or None: log-probabilities */
    PyObject *marks;        /* tuple of bytes: a text that holds one is parsed */
    PyObject *add_time;     /* called with the time of the read of each matching chunk */
    PyObject *add_count;    /* NULL, or called with its running total, or else the number of tokens
                               in its log-probabilities, where there are ``gaps`` */
    PyObject *add_text;     /* NULL, or called with its text as written in JSON */
    PyObject *fallback;     /* called with time and bytes of all that does not match */
    long long total;        /* the latest running total of tokens */
    /* of a handler for TLS, which has none of these but the fallback: */
    PyObject *write, *read; /* into OpenSSL's memory, and plain text out of it */
    PyObject *receiver;     /* its exchange gets the plain text */
} ReadHandler;

typedef struct {
    const char *text;
    Py_ssize_t text_bytes;
    long long total;
    Py_ssize_t listed;
} Chunk;

/* Return the end of a JSON string's text; NULL if it is empty or has to be parsed. */
static const char *end_of_text(ReadHandler *self, const char *text, const char *end)
{
    int ascii;
    const char *at = end_of_string(text, end, &ascii);
    if (at == NULL || at == text)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->marks); i++) {
        PyObject *mark = PyTuple_GET_ITEM(self->marks, i);
        if (PyBytes_GET_SIZE(mark) <= at - text
            && memmem(text, at - text, PyBytes_AS_STRING(mark), PyBytes_GET_SIZE(mark)))
            return NULL;
    }
    return ascii || is_utf8(text, at - text) ? at : NULL;
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
    chunk->total = chunk->listed = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->fixed); i++) {
        if ((at = after_bytes(PyTuple_GET_ITEM(self->fixed, i), at, end)) == NULL)
            return 0;
        if (i < PyTuple_GET_SIZE(self->gaps)) {
            PyObject *gap = PyTuple_GET_ITEM(self->gaps, i);
            if (gap == Py_None)
                at = after_logprobs(at, end, &chunk->listed);
            else
                at = after_total(self, PyLong_AsLongLong(gap), at, end, &chunk->total);
            if (at == NULL)
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
        long long count = chunk.total ? chunk.total : chunk.listed;
        if (count && self->add_count != NULL
            && call(self->add_count, PyLong_FromLongLong(count)) < 0)
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
    if (self->write != NULL && self->fallback != NULL)
        return PyObject_Call(self->fallback, args, NULL);
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
    Py_VISIT(self->add_count);
    Py_VISIT(self->add_text);
    Py_VISIT(self->fallback);
    Py_VISIT(self->read);
    Py_VISIT(self->receiver);
    return 0;
}

/* Only what can be in a cycle: a holder may still call this. */
static int handler_clear(ReadHandler *self)
{
    Py_CLEAR(self->add_time);
    Py_CLEAR(self->add_count);
    Py_CLEAR(self->add_text);
    Py_CLEAR(self->fallback);
    Py_CLEAR(self->read);
    Py_CLEAR(self->receiver);
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
    Py_XDECREF(self->write);
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
                          &h.gaps, &PyTuple_Type, &h.marks, &h.add_time, &h.add_count, &h.add_text,
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
    self->add_count = h.add_count == Py_None ? NULL : Py_NewRef(h.add_count);
    self->add_text = h.add_text == Py_None ? NULL : Py_NewRef(h.add_text);
    self->fallback = Py_NewRef(h.fallback);
    self->total = h.total;
    return (PyObject *)self;
}

static PyObject *tls_handler(PyObject *module, PyObject *args)
{
    ReadHandler h = {0};
    if (!PyArg_ParseTuple(args, "OOOO", &h.write, &h.read, &h.receiver, &h.fallback))
        return NULL;
    ReadHandler *self = (ReadHandler *)PyType_GenericAlloc(&ReadHandlerType, 0);
    if (self == NULL)
        return NULL;
    self->write = Py_NewRef(h.write);
    self->read = Py_NewRef(h.read);
    self->receiver = Py_NewRef(h.receiver);
    self->fallback = Py_NewRef(h.fallback);
    return (PyObject *)self;
}

#endif
