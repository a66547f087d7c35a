/* Recognising a file's chat template.  Private to model/. */
#ifndef MODEL_CHAT_TEMPLATE_H
#define MODEL_CHAT_TEMPLATE_H

#include "model/model.h"

enum { CHAT_TEMPLATE_MAX_BYTES = 64 * 1024 };

struct chat_template {
    const char *name; /* "chatml" */
    bool has_system;  /* a system message stands before a first message that is none */
    char *system;     /* its content */
    size_t system_len;
};

/* 0; MODEL_ERR_UNSUPPORTED naming what the template looks like; MODEL_ERR_NOMEM. */
int chat_template_read(struct gguf_string source, struct chat_template *out, struct kv_why *why);
void chat_template_release(struct chat_template *c);

#endif
