#include "model/model.h"

const char *model_strerror(int rc)
{
    switch (rc) {
    case MODEL_OK:
        return "ok";
    case MODEL_ERR_IO:
        return "cannot be read";
    case MODEL_ERR_FORMAT:
        return "malformed";
    case MODEL_ERR_UNSUPPORTED:
        return "not supported";
    case MODEL_ERR_NOMEM:
        return "no memory";
    case MODEL_ERR_INVALID:
        return "invalid";
    case MODEL_ERR_NUMERIC:
        return "not finite";
    case MODEL_ERR_UTF8:
        return "not UTF-8";
    case MODEL_ERR_KV:
        return "no KV";
    case MODEL_ERR_OPTION:
        return "not for this model or machine";
    default:
        return kv_strerror(rc);
    }
}
