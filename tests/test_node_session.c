/* The session section: what goes in comes out, and every other byte string is refused, whatever was
 * done to it: each bit flipped, each length cut or added, lying lengths under a CRC that holds,
 * random bytes.  Buffers are exactly as long as the section, so that a sanitizer sees a read past.
 */
#include "node/node.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

enum { POSITIONS = 300, TAIL = 3 };

static const uint32_t tail[TAIL] = {7, 0, UINT32_MAX};

static struct node_session sample(void)
{
    struct node_session s = {
        .name = "chat-1.a_B",
        .tenant = "default",
        .salt = {.bytes = {1, 0, 255}, .len = 3},
        .n_ids = POSITIONS + TAIL,
        .tail = tail,
        .n_tail = TAIL,
    };

    return s;
}

static unsigned char *encode(const struct node_session *s, size_t *len)
{
    struct kv_why why;
    void *data;

    ck_assert_msg(node_session_encode(s, &data, len, &why) == 0, "%s", why.text);
    return data;
}

static int decode(const unsigned char *data, size_t len, uint32_t n_positions, struct kv_why *why)
{
    unsigned char *exact = malloc(len + (len == 0));
    struct node_session out;
    int rc;

    ck_assert_ptr_nonnull(exact);
    memcpy(exact, data, len);
    why->text[0] = '\0';
    rc = node_session_decode(exact, len, n_positions, &out, why);
    free(exact);
    if (rc == 0)
        node_session_release(&out);
    return rc;
}

static void put(unsigned char *data, size_t at, uint32_t value)
{
    memcpy(data + at, &value, sizeof(value));
}

/* The CRC of what stands there now. */
static void reseal(unsigned char *data, size_t len)
{
    put(data, 4, kv_crc32c(0, data + 8, len - 8));
}

START_TEST(what_goes_in_comes_out)
{
    struct node_session s = sample(), out;
    struct kv_why why;
    size_t len;
    unsigned char *data = encode(&s, &len);

    ck_assert_uint_eq(len, 32 + 4 * TAIL + strlen(s.name) + strlen(s.tenant) + s.salt.len);
    ck_assert_msg(node_session_decode(data, len, POSITIONS, &out, &why) == 0, "%s", why.text);
    ck_assert_str_eq(out.name, s.name);
    ck_assert_str_eq(out.tenant, s.tenant);
    ck_assert_uint_eq(out.salt.len, 3);
    ck_assert_mem_eq(out.salt.bytes, s.salt.bytes, 3);
    ck_assert_uint_eq(out.n_ids, POSITIONS + TAIL);
    ck_assert_uint_eq(out.n_tail, TAIL);
    ck_assert_mem_eq(out.tail, tail, sizeof(tail));
    node_session_release(&out);
    free(data);

    s.n_tail = 0;
    s.n_ids = POSITIONS;
    s.salt.len = 0;
    data = encode(&s, &len);
    ck_assert_int_eq(node_session_decode(data, len, POSITIONS, &out, &why), 0);
    ck_assert_uint_eq(out.n_tail, 0);
    node_session_release(&out);
    free(data);
}
END_TEST

START_TEST(every_flipped_bit_is_refused)
{
    struct node_session s = sample();
    struct kv_why why;
    size_t len;
    unsigned char *data = encode(&s, &len);

    for (size_t bit = 0; bit < 8 * len; bit++) {
        data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        ck_assert_msg(decode(data, len, POSITIONS, &why) < 0, "bit %zu", bit);
        ck_assert_msg(strncmp(why.text, "session: ", 9) == 0, "%s", why.text);
        data[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    ck_assert_int_eq(decode(data, len, POSITIONS, &why), 0);
    free(data);
}
END_TEST

START_TEST(every_other_length_is_refused)
{
    struct node_session s = sample();
    struct kv_why why;
    size_t len;
    unsigned char *data = encode(&s, &len), *longer = calloc(1, len + 16);

    ck_assert_ptr_nonnull(longer);
    memcpy(longer, data, len);
    for (size_t n = 0; n < len + 16; n++) {
        if (n != len)
            ck_assert_msg(decode(longer, n, POSITIONS, &why) < 0, "%zu bytes", n);
    }
    free(longer);
    free(data);
}
END_TEST

START_TEST(lying_fields_are_refused_though_the_crc_holds)
{
    static const uint32_t lies[] = {0, 1, 2, 64, 65, 128, 129, 0x7fffffff, 0x80000000, UINT32_MAX};
    struct node_session s = sample();
    struct kv_why why;
    size_t len;
    unsigned char *data = encode(&s, &len), *bent = malloc(len);

    ck_assert_ptr_nonnull(bent);
    for (size_t at = 8; at < 32; at += 4) {
        for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
            memcpy(bent, data, len);
            put(bent, at, lies[i]);
            if (memcmp(bent, data, len) == 0)
                continue;
            reseal(bent, len);
            ck_assert_msg(decode(bent, len, POSITIONS, &why) < 0, "%u at %zu", lies[i], at);
        }
    }
    /* Lengths that add up to as much, so that a name or tenant would be cut elsewhere: still within
     * the data, and a name all the same or none. */
    memcpy(bent, data, len);
    bent[32 + 4 * TAIL] = '/';
    reseal(bent, len);
    ck_assert_int_eq(decode(bent, len, POSITIONS, &why), KV_ERR_FORMAT);
    ck_assert_str_eq(why.text, "session: its name is none");
    memcpy(bent, data, len);
    bent[32 + 4 * TAIL + strlen(s.name) + 2] = '\0';
    reseal(bent, len);
    ck_assert_int_eq(decode(bent, len, POSITIONS, &why), KV_ERR_FORMAT);
    ck_assert_str_eq(why.text, "session: its tenant is none");
    /* Of another snapshot, which has other positions. */
    ck_assert_int_eq(decode(data, len, POSITIONS - 1, &why), KV_ERR_FORMAT);
    free(bent);
    free(data);
}
END_TEST

START_TEST(random_bytes_under_a_valid_crc_are_refused_or_read_within_their_length)
{
    unsigned char data[200];
    struct kv_why why;
    uint32_t x = 5, n_refused = 0;

    for (int i = 0; i < 20000; i++) {
        const size_t len = 32 + (x >> 8) % (sizeof(data) - 32);

        for (size_t k = 0; k < len; k++) {
            x = x * 1664525u + 1013904223u;
            data[k] = (unsigned char)(x >> 24);
        }
        memcpy(data, "BSES", 4);
        put(data, 8, 1);
        for (size_t at = 16; at < 32; at += 4)
            put(data, at, data[at] % 32u);
        put(data, 12, POSITIONS + data[16]);
        reseal(data, len);
        n_refused += decode(data, len, POSITIONS, &why) < 0;
    }
    ck_assert_uint_gt(n_refused, 10000);
}
END_TEST

START_TEST(what_no_section_holds_is_not_written)
{
    struct node_session s = sample();
    struct kv_why why;
    void *data = NULL;
    size_t len;

    s.name[0] = '\0';
    ck_assert_int_eq(node_session_encode(&s, &data, &len, &why), KV_ERR_INVALID);
    s = sample();
    s.tenant[0] = '\0';
    ck_assert_int_eq(node_session_encode(&s, &data, &len, &why), KV_ERR_INVALID);
    s = sample();
    s.n_tail = s.n_ids + 1;
    ck_assert_int_eq(node_session_encode(&s, &data, &len, &why), KV_ERR_INVALID);
    s.n_tail = s.n_ids = KV_MAX_SESSION_BYTES / 4;
    s.tail = calloc(s.n_tail, sizeof(*s.tail));
    ck_assert_ptr_nonnull(s.tail);
    ck_assert_int_eq(node_session_encode(&s, &data, &len, &why), KV_ERR_LIMIT);
    node_session_release(&s);
    ck_assert_ptr_null(data);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("node session");
    TCase *c = tcase_create("session");
    SRunner *r;
    int failed;

    tcase_set_timeout(c, 60);
    tcase_add_test(c, what_goes_in_comes_out);
    tcase_add_test(c, every_flipped_bit_is_refused);
    tcase_add_test(c, every_other_length_is_refused);
    tcase_add_test(c, lying_fields_are_refused_though_the_crc_holds);
    tcase_add_test(c, random_bytes_under_a_valid_crc_are_refused_or_read_within_their_length);
    tcase_add_test(c, what_no_section_holds_is_not_written);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}
