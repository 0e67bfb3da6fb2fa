/* safetensors.h - strict readers for JSON and for *.safetensors, in plain C99.

   A safetensors file is: 8 bytes, the little-endian length n of the header; n bytes of JSON; the
   data.  The header maps names to {"dtype": "BF16", "shape": [768, 256], "data_offsets": [from,
   to]}, offsets counted from the start of the data.  A file comes from anywhere, so nothing in it
   is believed: whatever is wrong ends in one line that names the file and the field.

   Functions that can fail take error[ERROR_CHARS] and return 0, or -1 with a line in it. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tiny_mla.h"

static int refuse(char *error, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(error, ERROR_CHARS, format, args);
    va_end(args);
    for (char *c = error; *c; c++) /* names from the file must not break the one line */
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return -1;
}

/* ---------------------------------------------------------------------------------------------
   JSON: json_parse() checks the syntax of the whole text once; after that a value is a span of
   text, and the functions below may walk it without looking for errors. */

typedef struct json {
    const char *at, *end; /* at == NULL: there is no such value */
} json;

enum { JSON_MAX_DEPTH = 16 };

static const char *json_space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r')) p++;
    return p;
}

/* Each json_skip_* returns the place behind what it read, or NULL when the syntax is wrong. */
static const char *json_skip_string(const char *p, const char *end)
{
    if (p == end || *p++ != '"') return NULL;
    while (p < end && *p != '"') {
        if ((unsigned char)*p < 0x20) return NULL;
        if (*p++ == '\\') {
            if (p == end || *p == 0 || !strchr("\"\\/bfnrtu", *p)) return NULL;
            if (*p++ == 'u')
                for (int i = 0; i < 4; i++, p++)
                    if (p == end || *p == 0 || !strchr("0123456789abcdefABCDEF", *p)) return NULL;
        }
    }
    return p < end ? p + 1 : NULL;
}

static const char *json_skip_digits(const char *p, const char *end)
{
    const char *first = p;
    while (p < end && *p >= '0' && *p <= '9') p++;
    return p > first ? p : NULL;
}

static const char *json_skip_number(const char *p, const char *end)
{
    if (p < end && *p == '-') p++;
    if (p < end && *p == '0')
        p++;
    else if (!(p = json_skip_digits(p, end)))
        return NULL;
    if (p < end && *p == '.' && !(p = json_skip_digits(p + 1, end))) return NULL;
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        p = json_skip_digits(p, end);
    }
    return p;
}

static const char *json_skip_value(const char *p, const char *end, int depth)
{
    static const char *const words[] = {"true", "false", "null"};
    p = json_space(p, end);
    if (p == end || depth > JSON_MAX_DEPTH) return NULL;
    if (*p == '"') return json_skip_string(p, end);
    if (*p == '{' || *p == '[') {
        char open = *p, close = open == '{' ? '}' : ']';
        p = json_space(p + 1, end);
        if (p < end && *p == close) return p + 1;
        for (;;) {
            if (open == '{') {
                if (!(p = json_skip_string(json_space(p, end), end))) return NULL;
                p = json_space(p, end);
                if (p == end || *p++ != ':') return NULL;
            }
            if (!(p = json_skip_value(p, end, depth + 1))) return NULL;
            p = json_space(p, end);
            if (p == end || (*p != ',' && *p != close)) return NULL;
            if (*p++ == close) return p;
        }
    }
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(end - p) >= n && !memcmp(p, words[i], n)) return p + n;
    }
    return json_skip_number(p, end);
}

/* The one object that the text must consist of. */
static int json_parse(const char *text, size_t size, json *object)
{
    const char *end = text + size, *last;
    object->at = json_space(text, end);
    if (object->at == end || *object->at != '{') return -1;
    last = json_skip_value(object->at, end, 0);
    object->end = last;
    return last && json_space(last, end) == end ? 0 : -1;
}

static int json_is(json v, const char *text)
{
    return v.at && (size_t)(v.end - v.at) == strlen(text) && !memcmp(v.at, text, strlen(text));
}

/* Walk the members of an object (key gets its text without quotes) or, with key == NULL, the
   elements of an array.  *at starts as NULL; the result is 0 at the end. */
static int json_next(json container, const char **at, json *key, json *value)
{
    const char *p = *at ? *at : container.at + 1, *end = container.end;
    p = json_space(p, end);
    if (*p == ',') p = json_space(p + 1, end);
    if (*p == '}' || *p == ']') return 0;
    if (key) {
        key->at = p + 1;
        p = json_skip_string(p, end);
        key->end = p - 1;
        p = json_space(p, end) + 1; /* the colon */
    }
    value->at = json_space(p, end);
    value->end = json_skip_value(value->at, end, 0);
    *at = value->end;
    return 1;
}

/* How often the key occurs, and the value of its last occurrence. */
static int json_find(json object, const char *name, json *value)
{
    const char *at = NULL;
    json key, v;
    int found = 0;
    value->at = value->end = NULL;
    if (!object.at || *object.at != '{') return 0;
    while (json_next(object, &at, &key, &v))
        if (json_is(key, name)) {
            *value = v;
            found++;
        }
    return found;
}

/* A whole number that is not negative: 0 and *number, or -1. */
static int json_whole(json v, uint64_t *number)
{
    uint64_t n = 0;
    if (!v.at || v.at == v.end) return -1;
    for (const char *p = v.at; p < v.end; p++) {
        if (*p < '0' || *p > '9' || n > (UINT64_MAX - 9) / 10) return -1;
        n = 10 * n + (uint64_t)(*p - '0');
    }
    *number = n;
    return 0;
}

static int json_number(json v, double *number)
{
    char digits[64];
    size_t n = (size_t)(v.end - v.at);
    if (!v.at || n >= sizeof digits || json_skip_number(v.at, v.end) != v.end) return -1;
    memcpy(digits, v.at, n);
    digits[n] = 0;
    *number = strtod(digits, NULL);
    return 0;
}

/* ---------------------------------------------------------------------------------------------
   safetensors */

enum { TENSOR_MAX_RANK = 8 };

typedef struct tensor {
    json name;
    char dtype[16];
    int rank;
    uint64_t shape[TENSOR_MAX_RANK];
    uint64_t from, to; /* in the data */
} tensor;

typedef struct safetensors {
    const char *path;
    char *file;
    const unsigned char *data;
    uint64_t data_bytes;
    tensor *tensors; /* ordered by place in the data */
    int count;
} safetensors;

static int tensor_item_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        int bytes;
    } types[] = {{"BF16", 2}, {"F16", 2}, {"F32", 4},  {"F64", 8},     {"I8", 1},
                 {"I16", 2},  {"I32", 4}, {"I64", 8},  {"U8", 1},      {"U16", 2},
                 {"U32", 4},  {"U64", 8}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (!strcmp(dtype, types[i].name)) return types[i].bytes;
    return 0;
}

/* How much of the name a message shows. */
static int tensor_name_chars(const tensor *t)
{
    return t->name.end - t->name.at < 200 ? (int)(t->name.end - t->name.at) : 200;
}

/* One entry of the header. */
static int tensor_parse(const safetensors *st, tensor *t, json entry, char *error)
{
    json v, element;
    const char *at = NULL;
    const char *name = t->name.at;
    int name_chars = tensor_name_chars(t);
    uint64_t bytes, offset[2] = {0, 0};
    int n = 0;

#define TENSOR_FAIL(what) refuse(error, "%s: %.*s: %s", st->path, name_chars, name, what)
    if (json_find(entry, "dtype", &v) != 1 || *v.at != '"')
        return TENSOR_FAIL("dtype must be given, once, as a string");
    if ((size_t)(v.end - v.at) - 2 >= sizeof t->dtype) return TENSOR_FAIL("dtype is unknown");
    memset(t->dtype, 0, sizeof t->dtype);
    memcpy(t->dtype, v.at + 1, (size_t)(v.end - v.at) - 2);
    bytes = (uint64_t)tensor_item_bytes(t->dtype);
    if (bytes == 0) return TENSOR_FAIL("dtype is unknown");

    if (json_find(entry, "shape", &v) != 1 || *v.at != '[')
        return TENSOR_FAIL("shape must be given, once, as an array");
    for (t->rank = 0; json_next(v, &at, NULL, &element); t->rank++) {
        if (t->rank == TENSOR_MAX_RANK) return TENSOR_FAIL("shape has too many dimensions");
        if (json_whole(element, &t->shape[t->rank]))
            return TENSOR_FAIL("shape must hold whole numbers");
        /* Both factors stay below 2^31, the limit of read_file(), so no product overflows. */
        if (t->shape[t->rank] > st->data_bytes || (bytes *= t->shape[t->rank]) > st->data_bytes)
            return TENSOR_FAIL("shape is larger than the data in the file");
    }

    if (json_find(entry, "data_offsets", &v) != 1 || *v.at != '[')
        return TENSOR_FAIL("data_offsets must be given, once, as an array");
    for (at = NULL; json_next(v, &at, NULL, &element); n++)
        if (n == 2 || json_whole(element, &offset[n]))
            return TENSOR_FAIL("data_offsets must be two whole numbers");
    if (n != 2) return TENSOR_FAIL("data_offsets must be two whole numbers");
    t->from = offset[0];
    t->to = offset[1];
    if (t->to > st->data_bytes)
        return refuse(error,
                      "%s: %.*s: data_offsets end at %llu but the file holds %llu bytes of data",
                      st->path, name_chars, name, (unsigned long long)t->to,
                      (unsigned long long)st->data_bytes);
    if (t->from > t->to || t->to - t->from != bytes)
        return TENSOR_FAIL("data_offsets do not match dtype and shape");
#undef TENSOR_FAIL
    return 0;
}

static int tensor_order(const void *a, const void *b)
{
    const tensor *x = (const tensor *)a, *y = (const tensor *)b;
    if (x->from != y->from) return x->from < y->from ? -1 : 1;
    return (x->to > y->to) - (x->to < y->to);
}

static void safetensors_close(safetensors *st)
{
    free(st->file);
    free(st->tensors);
    memset(st, 0, sizeof *st);
}

/* Read the file and check everything that can be checked without knowing the model. */
static int safetensors_open(safetensors *st, const char *path, char *error)
{
    size_t size;
    uint64_t header_bytes = 0, expected = 0;
    const char *at = NULL;
    json header, name, entry;

    memset(st, 0, sizeof *st);
    st->path = path;
    if (!(st->file = read_file(path, &size, error))) return -1;
    if (size < 8)
        return refuse(error, "%s: header length: the file has only %zu bytes", path, size);
    for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | (unsigned char)st->file[i];
    if (header_bytes > size - 8)
        return refuse(error, "%s: header length: %llu bytes, but only %zu follow", path,
                      (unsigned long long)header_bytes, size - 8);
    if (json_parse(st->file + 8, (size_t)header_bytes, &header))
        return refuse(error, "%s: header: not a JSON object", path);
    st->data = (const unsigned char *)st->file + 8 + header_bytes;
    st->data_bytes = size - 8 - header_bytes;

    while (json_next(header, &at, &name, &entry)) {
        if (json_is(name, "__metadata__")) continue;
        if (st->count % 64 == 0) {
            size_t bytes = ((size_t)st->count + 64) * sizeof(tensor);
            tensor *more = (tensor *)realloc(st->tensors, bytes);
            if (!more) return refuse(error, "%s: header: out of memory", path);
            st->tensors = more;
        }
        st->tensors[st->count].name = name;
        if (tensor_parse(st, &st->tensors[st->count], entry, error)) return -1;
        st->count++;
    }
    if (st->count == 0) return refuse(error, "%s: header: no tensors", path);

    /* The tensors must fill the data without a gap and without an overlap. */
    qsort(st->tensors, (size_t)st->count, sizeof(tensor), tensor_order);
    for (int i = 0; i < st->count; i++) {
        const tensor *t = &st->tensors[i];
        if (t->from != expected)
            return refuse(error, "%s: %.*s: data_offsets begin at %llu, expected %llu", path,
                          tensor_name_chars(t), t->name.at, (unsigned long long)t->from,
                          (unsigned long long)expected);
        expected = t->to;
    }
    if (expected != st->data_bytes)
        return refuse(error, "%s: data: %llu bytes, but the tensors need %llu", path,
                      (unsigned long long)st->data_bytes, (unsigned long long)expected);
    return 0;
}

/* The BF16 tensor `name` of shape [rows, columns], or [columns] when rows is 0, as new floats. */
static int safetensors_load(const safetensors *st, const char *name, int rows, int columns,
                            float **out, char *error)
{
    const tensor *t = NULL;
    const unsigned char *bits;
    size_t n = (size_t)columns * (size_t)(rows ? rows : 1);

    for (int i = 0; i < st->count; i++)
        if (json_is(st->tensors[i].name, name)) {
            if (t) return refuse(error, "%s: %s: occurs twice", st->path, name);
            t = &st->tensors[i];
        }
    if (!t) return refuse(error, "%s: %s: missing", st->path, name);
    if (strcmp(t->dtype, "BF16"))
        return refuse(error, "%s: %s: dtype is %s, must be BF16", st->path, name, t->dtype);
    if (rows && (t->rank != 2 || t->shape[0] != (uint64_t)rows || t->shape[1] != (uint64_t)columns))
        return refuse(error, "%s: %s: shape must be [%d, %d], as config.json has it", st->path,
                      name, rows, columns);
    if (!rows && (t->rank != 1 || t->shape[0] != (uint64_t)columns))
        return refuse(error, "%s: %s: shape must be [%d], as config.json has it", st->path, name,
                      columns);

    if (!(*out = (float *)malloc(n * sizeof(float))))
        return refuse(error, "%s: %s: out of memory", st->path, name);
    bits = st->data + t->from;
    for (size_t i = 0; i < n; i++) {
        uint32_t word = (uint32_t)bits[2 * i] << 16 | (uint32_t)bits[2 * i + 1] << 24;
        if ((word & 0x7f800000u) == 0x7f800000u)
            return refuse(error, "%s: %s: element %zu is not finite", st->path, name, i);
        memcpy(*out + i, &word, sizeof word);
    }
    return 0;
}

#endif
