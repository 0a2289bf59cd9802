/*
 * safetensors: every dtype round trips, and every way that a downloaded folder has been seen to be
 * broken is refused by name. CKPT-02: a shard cut short, a Git LFS pointer, a file cut while it is
 * used. CKPT-03: an index that disagrees with its shards, stray files.
 */
#include "model/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/model/folder.h"

/* Opens, expects the status and a part of the text, and gives back what was opened if it was. */
static struct safetensors *expect_open(const struct folder *folder, const char *case_name,
                                       enum status wanted, const char *part)
{
    struct safetensors *st = NULL;
    struct error err = {""};
    enum status status = safetensors_open(folder->path, &st, &err);
    if (status != wanted || (part && !strstr(err.text, part))) {
        fail_msg("%s: %s \"%s\", wanted %s with \"%s\"", case_name, status_name(status), err.text,
                 status_name(wanted), part ? part : "");
    }
    return st;
}

#define PAIR(name, begin, end) \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" begin "," end "]}"

static void test_headers(void **state)
{
    static const struct {
        const char *name, *header;
        size_t data_bytes;
        enum status status;
        const char *part;
    } cases[] = {
        {"good", "{" PAIR("a", "0", "4") "," PAIR("b", "4", "8") "}", 8, STATUS_OK, NULL},
        {"order of text does not matter", "{" PAIR("b", "4", "8") "," PAIR("a", "0", "4") "}", 8,
         STATUS_OK, NULL},
        {"metadata, padding, no tensor", "{\"__metadata__\":{\"format\":\"pt\"}}   ", 0, STATUS_OK,
         NULL},
        {"scalar and empty tensor",
         "{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
         "\"e\":{\"dtype\":\"F32\",\"shape\":[3,0],\"data_offsets\":[4,4]}}",
         4, STATUS_OK, NULL},
        {"short by a byte", "{" PAIR("a", "0", "4") "}", 3, STATUS_CORRUPT, "1 bytes short"},
        {"a byte too many", "{" PAIR("a", "0", "4") "}", 5, STATUS_CORRUPT, "1 bytes beyond"},
        {"gap", "{" PAIR("a", "0", "4") "," PAIR("b", "5", "9") "}", 9, STATUS_CORRUPT, "gap"},
        {"gap in front", "{" PAIR("a", "1", "5") "}", 5, STATUS_CORRUPT, "gap"},
        {"overlap", "{" PAIR("a", "0", "4") "," PAIR("b", "3", "7") "}", 7, STATUS_CORRUPT,
         "overlap"},
        {"the same range twice", "{" PAIR("a", "0", "4") "," PAIR("b", "0", "4") "}", 4,
         STATUS_CORRUPT, "overlap"},
        {"the same name twice", "{" PAIR("a", "0", "4") "," PAIR("a", "4", "8") "}", 8,
         STATUS_CORRUPT, "header"},
        {"end before begin", "{" PAIR("a", "4", "0") "}", 4, STATUS_CORRUPT, "rising"},
        {"negative", "{" PAIR("a", "-4", "0") "}", 4, STATUS_CORRUPT, "rising"},
        {"offsets as reals", "{" PAIR("a", "0.0", "4.0") "}", 4, STATUS_CORRUPT, "data_offsets"},
        {"offset beyond int64", "{" PAIR("a", "0", "18446744073709551616") "}", 4, STATUS_CORRUPT,
         "header"},
        {"shape against bytes", "{" PAIR("a", "0", "5") "}", 5, STATUS_CORRUPT, "contradict"},
        {"product overflows",
         "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,4],\"data_offsets\":[0,0]}}",
         0, STATUS_CORRUPT, "too large"},
        {"bytes overflow",
         "{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0,
         STATUS_CORRUPT, "contradict"},
        {"negative dimension", "{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,0]}}",
         0, STATUS_CORRUPT, "dimension"},
        {"nine dimensions",
         "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
         STATUS_CORRUPT, "shape"},
        {"unknown dtype", "{\"a\":{\"dtype\":\"F6\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         STATUS_UNSUPPORTED, "F6"},
        {"a key too many",
         "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1,
         STATUS_CORRUPT, "exactly"},
        {"a key too few", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, STATUS_CORRUPT, "exactly"},
        {"tensor is a number", "{\"a\":1}", 0, STATUS_CORRUPT, "object"},
        {"empty name", "{" PAIR("", "0", "4") "}", 4, STATUS_CORRUPT, "name"},
        {"metadata of numbers", "{\"__metadata__\":{\"a\":1}}", 0, STATUS_CORRUPT, "__metadata__"},
        {"not an object", "[]", 0, STATUS_CORRUPT, "not an object"},
        {"not JSON", "{\"a\"", 0, STATUS_CORRUPT, "header"},
        {"deep", "{\"a\":[[[[[[[[[[[[1]]]]]]]]]]]]}", 0, STATUS_CORRUPT, "header"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct folder folder = folder_create();
        folder_write_tensors(&folder, "model.safetensors", cases[i].header, cases[i].data_bytes);
        safetensors_close(expect_open(&folder, cases[i].name, cases[i].status, cases[i].part));
        folder_remove(&folder);
    }
}

/* CKPT-02 and what else a file can be instead of itself. */
static void test_files(void **state)
{
    static const struct {
        const char *name, *bytes;
        size_t n;
        const char *part;
    } cases[] = {
        {"git lfs pointer",
         "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e"
         "adbb8f32b1258daaa5e2ca24d17e2393\nsize 3566148952\n",
         134, "Git LFS pointer"},
        {"empty", "", 0, "8 bytes short"},
        {"seven bytes", "\2\0\0\0\0\0\0", 7, "1 bytes short"},
        {"no header", "\0\0\0\0\0\0\0\0", 8, "not a safetensors file"},
        {"header over the cap", "\1\341\365\5\0\0\0\0{}", 10, "not a safetensors file"},
        {"huge header", "\377\377\377\377\377\377\377\377{}", 10, "not a safetensors file"},
        {"ends inside its header", "\12\0\0\0\0\0\0\0{}", 10, "8 bytes short"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct folder folder = folder_create();
        folder_write(&folder, "model.safetensors", cases[i].bytes, cases[i].n);
        expect_open(&folder, cases[i].name, STATUS_CORRUPT, cases[i].part);
        folder_remove(&folder);
    }

    struct folder folder = folder_create();
    expect_open(&folder, "nothing there", STATUS_NOT_FOUND, "neither");
    assert_int_equal(symlink("/dev/zero", folder_file(&folder, "model.safetensors")), 0);
    expect_open(&folder, "a device", STATUS_CORRUPT, "regular file");
    unlink(folder_file(&folder, "model.safetensors"));
    assert_int_equal(mkfifo(folder_file(&folder, "model.safetensors"), 0600), 0);
    expect_open(&folder, "a fifo", STATUS_CORRUPT, "regular file");
    unlink(folder_file(&folder, "model.safetensors"));
    assert_int_equal(mkdir(folder_file(&folder, "model.safetensors"), 0700), 0);
    expect_open(&folder, "a folder", STATUS_CORRUPT, "regular file");
    folder_remove(&folder);
    expect_open(&folder, "no folder", STATUS_NOT_FOUND, folder.path);
}

#define HEAD_A "{" PAIR("a", "0", "4") "}"
#define HEAD_B "{" PAIR("b", "0", "4") "}"
#define INDEX(a, b) "{\"weight_map\":{\"a\":\"" a "\",\"b\":\"" b "\"}}"

/* CKPT-03: shards 1 (tensor a) and 2 (tensor b), and what an index may say of them. */
static void test_index(void **state)
{
    static const struct {
        const char *name, *index;
        enum status status;
        const char *part;
    } cases[] = {
        {"good", INDEX("1.safetensors", "2.safetensors"), STATUS_OK, NULL},
        {"not an object", "[1]", STATUS_CORRUPT, "weight_map"},
        {"empty file", "", STATUS_CORRUPT, "model.safetensors.index.json"},
        {"empty object", "{}", STATUS_CORRUPT, "weight_map"},
        {"empty map", "{\"weight_map\":{}}", STATUS_CORRUPT, "weight_map"},
        {"map is a list", "{\"weight_map\":[\"a\"]}", STATUS_CORRUPT, "weight_map"},
        {"swapped shards", INDEX("2.safetensors", "1.safetensors"), STATUS_CORRUPT,
         "says that a is in 2.safetensors, but it is in 1.safetensors"},
        {"ghost tensor",
         "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"g\":\"1.safetensors\"}"
         "}",
         STATUS_CORRUPT, "says that g is in 1.safetensors, but neither"},
        {"omitted tensor", "{\"weight_map\":{\"b\":\"2.safetensors\",\"a2\":\"12.safetensors\"}}",
         STATUS_CORRUPT, "leaves out a, which 12.safetensors has"},
        {"absent shard", INDEX("1.safetensors", "3.safetensors"), STATUS_NOT_FOUND,
         "3.safetensors, which model.safetensors.index.json names"},
        {"path outside", INDEX("../1.safetensors", "2.safetensors"), STATUS_CORRUPT,
         "not the name of a file"},
        {"absolute path", INDEX("/dev/zero", "2.safetensors"), STATUS_CORRUPT,
         "not the name of a file"},
        {"parent", INDEX("..", "2.safetensors"), STATUS_CORRUPT, "not the name of a file"},
        {"empty name", INDEX("", "2.safetensors"), STATUS_CORRUPT, "not the name of a file"},
        {"NUL in a name", INDEX("1.safetensors\\u0000x", "2.safetensors"), STATUS_CORRUPT,
         "not the name of a file"},
        {"shard is a number", "{\"weight_map\":{\"a\":1}}", STATUS_CORRUPT, "not a string"},
        {"shard is a device", INDEX("zero", "2.safetensors"), STATUS_CORRUPT, "regular file"},
        {"a tensor in two shards",
         "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"a2\":\"12."
         "safetensors\"}}",
         STATUS_CORRUPT, "a is in both"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct folder folder = folder_create();
        folder_write_tensors(&folder, "1.safetensors", HEAD_A, 4);
        folder_write_tensors(&folder, "2.safetensors", HEAD_B, 4);
        folder_write_tensors(&folder, "12.safetensors",
                             "{" PAIR("a", "0", "4") "," PAIR("a2", "4", "8") "}", 8);
        folder_write_tensors(&folder, "stray.safetensors", "not looked at", 0);
        folder_write_tensors(&folder, "model.safetensors", "nor is this", 0);
        assert_int_equal(symlink("/dev/zero", folder_file(&folder, "zero")), 0);
        folder_write_text(&folder, "model.safetensors.index.json", cases[i].index);
        struct safetensors *st =
            expect_open(&folder, cases[i].name, cases[i].status, cases[i].part);
        if (st) {
            assert_int_equal(safetensors_n(st), 2);
            assert_int_equal(safetensors_n_shards(st), 2);
            assert_int_equal(safetensors_data_bytes(st), 8);
            assert_string_equal(safetensors_shard_name(st, 1), "2.safetensors");
        }
        safetensors_close(st);
        folder_remove(&folder);
    }
}

static void test_dtypes(void **state)
{
    static const struct {
        const char *name;
        size_t bytes;
    } dtypes[] = {{"BOOL", 1},    {"U8", 1},      {"I8", 1},  {"F8_E4M3", 1},
                  {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2},
                  {"F16", 2},     {"BF16", 2},    {"U32", 4}, {"I32", 4},
                  {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
    enum { N = sizeof(dtypes) / sizeof(dtypes[0]) };
    struct buf header = BUF_INIT;
    size_t offset = 0;
    for (size_t i = 0; i < N; i++) {
        buf_printf(
            &header, "%s\"t.%s\":{\"dtype\":\"%s\",\"shape\":[2,3],\"data_offsets\":[%zu,%zu]}",
            i ? "," : "{", dtypes[i].name, dtypes[i].name, offset, offset + 6 * dtypes[i].bytes);
        offset += 6 * dtypes[i].bytes;
    }
    buf_append_text(&header, "}");
    struct folder folder = folder_create();
    folder_write_tensors(&folder, "model.safetensors", buf_text(&header), offset);
    struct safetensors *st = expect_open(&folder, "all dtypes", STATUS_OK, NULL);
    assert_int_equal(safetensors_n(st), N);
    size_t at = 0;
    for (size_t i = 0; i < N; i++) {
        char name[32];
        uint8_t data[48];
        struct error err;
        snprintf(name, sizeof(name), "t.%s", dtypes[i].name);
        const struct safetensors_tensor *tensor = safetensors_find(st, name);
        assert_ptr_equal(tensor, safetensors_at(st, i));
        assert_string_equal(safetensors_dtype_name(tensor->dtype), dtypes[i].name);
        assert_int_equal(safetensors_dtype_bytes(tensor->dtype), dtypes[i].bytes);
        assert_int_equal(tensor->n_dims, 2);
        assert_int_equal(tensor->dims[1], 3);
        assert_int_equal(tensor->bytes, 6 * dtypes[i].bytes);
        assert_int_equal(safetensors_read(st, tensor, 0, tensor->bytes, data, &err), STATUS_OK);
        for (size_t b = 0; b < tensor->bytes; b++) {
            assert_int_equal(data[b], (uint8_t)(at + b));
        }
        assert_int_equal(safetensors_read(st, tensor, 5, 1, data, &err), STATUS_OK);
        assert_int_equal(data[0], (uint8_t)(at + 5));
        assert_int_equal(safetensors_read(st, tensor, 1, tensor->bytes, data, &err),
                         STATUS_INVALID);
        at += tensor->bytes;
    }
    assert_null(safetensors_find(st, "t.F4"));
    assert_null(safetensors_at(st, N));
    safetensors_close(st);
    folder_remove(&folder);
    buf_fini(&header);
}

/* CKPT-02: cut by a byte, by a page, and while it is open. */
static void test_cut(void **state)
{
    enum { BYTES = 10000 };
    const char *header = "{\"a\":{\"dtype\":\"U8\",\"shape\":[10000],\"data_offsets\":[0,10000]}}";
    struct folder folder = folder_create();
    struct error err;
    uint8_t *data = mem_alloc(BYTES);

    folder_write_tensors(&folder, "model.safetensors", header, BYTES);
    folder_truncate(&folder, "model.safetensors", 1);
    expect_open(&folder, "a byte", STATUS_CORRUPT, "model.safetensors is 1 bytes short");
    folder_truncate(&folder, "model.safetensors", 4095);
    expect_open(&folder, "a page", STATUS_CORRUPT, "model.safetensors is 4096 bytes short");

    folder_write_tensors(&folder, "model.safetensors", header, BYTES);
    struct safetensors *st = expect_open(&folder, "whole", STATUS_OK, NULL);
    const struct safetensors_tensor *tensor = safetensors_find(st, "a");
    assert_int_equal(safetensors_read(st, tensor, 0, BYTES, data, &err), STATUS_OK);
    folder_truncate(&folder, "model.safetensors", 5000);
    assert_int_equal(safetensors_read(st, tensor, 0, 4000, data, &err), STATUS_OK);
    assert_int_equal(safetensors_read(st, tensor, 0, BYTES, data, &err), STATUS_CORRUPT);
    assert_non_null(strstr(err.text, "5000 bytes short"));
    safetensors_close(st);
    mem_free(data);
    folder_remove(&folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers), cmocka_unit_test(test_files), cmocka_unit_test(test_index),
        cmocka_unit_test(test_dtypes),  cmocka_unit_test(test_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
