#include "kvcore/kvcore.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *kv_strerror(int rc)
{
    switch (rc) {
    case KV_OK:
        return "ok";
    case KV_ERR_FULL:
        return "full";
    case KV_ERR_BUSY:
        return "busy";
    case KV_ERR_NOMEM:
        return "no memory";
    case KV_ERR_INVALID:
        return "invalid";
    case KV_ERR_FORMAT:
        return "malformed";
    case KV_ERR_CHECK:
        return "check failed";
    case KV_ERR_MISMATCH:
        return "mismatch";
    case KV_ERR_ORDER:
        return "out of order";
    case KV_ERR_LIMIT:
        return "over the limit";
    case KV_ERR_IO:
        return "input/output error";
    case KV_ERR_NOT_FOUND:
        return "not found";
    default:
        return "unknown error";
    }
}

int kv_fail(struct kv_why *why, int rc, const char *fmt, ...)
{
    va_list ap;

    if (why == NULL)
        return rc;
    va_start(ap, fmt);
    vsnprintf(why->text, sizeof(why->text), fmt, ap);
    va_end(ap);
    return rc;
}

int kv_fail_in(struct kv_why *why, int rc, const char *fmt, ...)
{
    struct kv_why where;
    char all[2 * sizeof(where.text) + 2];
    va_list ap;

    if (why == NULL)
        return rc;
    va_start(ap, fmt);
    vsnprintf(where.text, sizeof(where.text), fmt, ap);
    va_end(ap);
    snprintf(all, sizeof(all), "%s: %s", where.text, why->text);
    memcpy(why->text, all, sizeof(why->text));
    why->text[sizeof(why->text) - 1] = '\0';
    return rc;
}
