/* JSON values that are passed over: their end, or NULL where they have to be parsed. Whatever is
   no valid JSON has to be, and so have a few rare forms. Line breaks have ended the event. */
#ifndef JSON_VALUES_H
#define JSON_VALUES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#define DEPTH_MAX 8                     /* of log-probabilities, where 6 is usual */

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

/* Return the quotation mark that ends a string's text. ``*ascii``: whether it is ASCII. */
static inline const char *end_of_string(const char *at, const char *end, int *ascii)
{
    unsigned char all = 0;
    while (at < end && *at != '"') {
        if ((unsigned char)*at < 0x20)
            return NULL;
        all |= *at;
        if ((at = *at == '\\' ? after_escape(at, end) : at + 1) == NULL)
            return NULL;
    }
    *ascii = all < 0x80;
    return at < end ? at : NULL;
}

static int is_utf8(const char *text, Py_ssize_t size)
{
    PyObject *decoded = PyUnicode_DecodeUTF8(text, size, NULL);
    if (decoded == NULL)
        PyErr_Clear();
    Py_XDECREF(decoded);
    return decoded != NULL;
}

static const char *after_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t'))
        at++;
    return at;
}

static const char *after_digits(const char *at, const char *end)
{
    const char *begin = at;
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at > begin ? at : NULL;
}

static const char *after_number(const char *at, const char *end)
{
    at += at < end && *at == '-';
    at = at < end && *at == '0' ? at + 1 : after_digits(at, end);
    if (at != NULL && at < end && *at == '.')
        at = after_digits(at + 1, end);
    if (at != NULL && at < end && (*at | 0x20) == 'e') {
        at++;
        at += at < end && (*at == '+' || *at == '-');
        at = after_digits(at, end);
    }
    return at;
}

static const char *after_word(const char *word, const char *at, const char *end)
{
    size_t size = strlen(word);
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

static const char *after_items(const char *at, const char *end, int depth);

/* Return the end of the value at ``at``, which is nested in ``depth`` others. */
static const char *after_value(const char *at, const char *end, int depth)
{
    int ascii;
    if (at >= end || depth > DEPTH_MAX)
        return NULL;
    switch (*at) {
    case '"':
        at = end_of_string(at + 1, end, &ascii);
        return at == NULL ? NULL : at + 1;
    case '{':
    case '[':
        return after_items(at, end, depth);
    case 't':
        return after_word("true", at, end);
    case 'f':
        return after_word("false", at, end);
    case 'n':
        return after_word("null", at, end);
    default:
        return after_number(at, end);
    }
}

/* Return where the value of the key at ``at`` begins. */
static const char *after_key(const char *at, const char *end)
{
    at = at < end && *at == '"' ? after_value(at, end, 0) : NULL;
    if (at == NULL || (at = after_space(at, end)) >= end || *at != ':')
        return NULL;
    return after_space(at + 1, end);
}

/* Return the comma or ``closing`` at ``at``, NULL if it is neither. */
static const char *after_item(const char *at, const char *end, char closing)
{
    if (at != NULL)
        at = after_space(at, end);
    return at != NULL && at < end && (*at == ',' || *at == closing) ? at : NULL;
}

/* Return the end of the object or array at ``at``. */
static const char *after_items(const char *at, const char *end, int depth)
{
    const char opening = *at, closing = opening == '{' ? '}' : ']';
    at = after_space(at + 1, end);
    if (at < end && *at == closing)
        return at + 1;
    for (;; at = after_space(at + 1, end)) {
        if (opening == '{' && (at = after_key(at, end)) == NULL)
            return NULL;
        if ((at = after_item(after_value(at, end, depth + 1), end, closing)) == NULL)
            return NULL;
        if (*at == closing)
            return at + 1;
    }
}

/* Return the end of an array of one or more tokens that all begin with ``first``; count them. */
static const char *after_tokens(const char *at, const char *end, char first, Py_ssize_t *tokens)
{
    do {
        const char *token = after_space(at + 1, end);
        if (token >= end || *token != first || (at = after_value(token, end, 2)) == NULL)
            return NULL;
        if (first == '"' && !is_utf8(token, at - token))    /* the parser does not read objects */
            return NULL;
        if ((at = after_item(at, end, ']')) == NULL)
            return NULL;
        ++*tokens;
    } while (*at != ']');
    return at + 1;
}

/* Return the end of the log-probabilities at ``at``: an object that lists its tokens, at least one,
   as "content", objects, or "tokens", strings. */
static const char *after_logprobs(const char *at, const char *end, Py_ssize_t *tokens)
{
    int seen = 0;
    if (at >= end || *at != '{')
        return NULL;
    do {
        const char *key = after_space(at + 1, end);
        if ((at = after_key(key, end)) == NULL)
            return NULL;
        int list = after_word("\"content\"", key, end)  ? 1
                   : after_word("\"tokens\"", key, end) ? 2
                                                        : 0;
        if (list & seen)                                    /* the parser takes the last */
            return NULL;
        seen |= list;
        if (!list || after_word("null", at, end))
            at = after_value(at, end, 1);
        else if (*tokens || at >= end || *at != '[')
            return NULL;
        else
            at = after_tokens(at, end, list == 1 ? '{' : '"', tokens);
        if ((at = after_item(at, end, '}')) == NULL)
            return NULL;
    } while (*at != '}');
    return *tokens ? at + 1 : NULL;
}

#endif
