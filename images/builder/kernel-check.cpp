// Do the kernels of a CPU variant compute what they should, on this very machine?
//
// A variant is one libggml-cpu-NAME.so. Each runs in a process of its own, since two cannot be loaded into one and a
// wrong one may die; all get the same weights and activations. Their results are compared with those of a reference variant by the normalized mean squared error, with the limit that
// llama.cpp's test-backend-ops has for these operations (5e-4). That program cannot do this: it compares a CPU variant
// with itself and never puts weights into the buffer types that a variant adds (AMX, CPU_REPACK).
//
// Linked against ggml and ggml-base alone. Prints one JSON object a variant.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr double LIMIT = 5e-4;  // tests/test-backend-ops.cpp: max_nmse_err of MUL_MAT, MUL_MAT_ID and FLASH_ATTN_EXT
constexpr int CHILD_TIMEOUT_S = 100;
// Multiples of what the buffer types ask for: 256 columns a K-quant's block, 32 rows AMX, 8 or 16 rows the repacked forms.
constexpr int64_t K = 768, ROWS = 64;
constexpr int64_t EXPERTS = 4, EXPERTS_USED = 2;
constexpr int64_t BATCH = 2;  // several sequences of a recurrent model share a matrix; the heads of MLA have one each
constexpr int64_t HEAD = 128, HEADS = 4, KV_HEADS = 2, CACHED = 512;

enum class Op { MUL_MAT, MUL_MAT_BATCH, MUL_MAT_HEADS, MUL_MAT_ID, FLASH_ATTN_EXT };

struct Case {
    Op        op;
    ggml_type type;    // of the weights, or of K
    ggml_type type_v;  // of V
    int       columns;
    size_t    offset;  // of its result among those of the reference, in floats
    size_t    size;
};

// What a child leaves behind, also when it dies: in memory that it shares with its parent.
struct Outcome {
    int    cases;
    int    is_done;
    int    is_refused;
    int    is_unloadable;
    double worst;
    char   worst_at[128];
    char   at[128];  // what runs now
};

struct Options {
    std::string                                  dir = ".";
    std::string                                  reference = "x64";
    std::vector<std::string>                     variants;
    std::vector<ggml_type>                       types;
    std::vector<std::pair<ggml_type, ggml_type>> kv;
    std::vector<int>                             columns = { 1, 8, 512 };
    int                                          threads = 2;
};

// Quantized, in memory that all processes share; null where a type is not used that way.
struct Weights {
    ggml_type type;
    uint8_t * rows;    // ROWS * K * EXPERTS; the first matrix serves MUL_MAT
    uint8_t * cached;  // HEAD * CACHED * KV_HEADS
};

const char * op_name(Op op) {
    switch (op) {
        case Op::MUL_MAT:        return "MUL_MAT";
        case Op::MUL_MAT_BATCH:  return "MUL_MAT of a batch";
        case Op::MUL_MAT_HEADS:  return "MUL_MAT of heads";
        case Op::MUL_MAT_ID:     return "MUL_MAT_ID";
        case Op::FLASH_ATTN_EXT: return "FLASH_ATTN_EXT";
    }
    return "";
}

std::string describe(const Case & c, const char * place) {
    std::string types = ggml_type_name(c.type);
    if (c.op == Op::FLASH_ATTN_EXT && c.type_v != c.type) {
        types += std::string("/") + ggml_type_name(c.type_v);
    }
    return std::string(op_name(c.op)) + " " + types + " n=" + std::to_string(c.columns) + " " + place;
}

// A linear congruential generator: the same numbers on every machine and C library. Uniform in [-1, 1).
std::vector<float> numbers(size_t count, uint32_t seed) {
    std::vector<float> found(count);
    uint32_t           state = seed * 2654435761u + 12345u;
    for (float & each : found) {
        state = state * 1664525u + 1013904223u;
        each  = float(state >> 8) / float(1 << 23) - 1.0f;
    }
    return found;
}

bool is_of_files(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            return true;
        case GGML_TYPE_Q8_1:  // activations only
        case GGML_TYPE_Q8_K:
            return false;
        default:
            return ggml_is_quantized(type) && ggml_type_size(type) > 0 && K % ggml_blck_size(type) == 0;
    }
}

template <typename T> T * shared(size_t count) {
    void * found = mmap(nullptr, std::max<size_t>(count, 1) * sizeof(T), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        perror("kernel-check: mmap");
        exit(3);
    }
    return static_cast<T *>(found);
}

void quantize(ggml_type type, const std::vector<float> & from, int64_t row, uint8_t * to) {
    const int64_t rows = int64_t(from.size()) / row;
    if (type == GGML_TYPE_F32) {
        memcpy(to, from.data(), from.size() * sizeof(float));
    } else if (type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(from.data(), (ggml_fp16_t *) to, int64_t(from.size()));
    } else if (type == GGML_TYPE_BF16) {
        ggml_fp32_to_bf16_row_ref(from.data(), (ggml_bf16_t *) to, int64_t(from.size()));
    } else {
        const std::vector<float> importance(row, 1.0f);
        ggml_quantize_chunk(type, from.data(), to, 0, rows, row, importance.data());
    }
}

// Made once, by a process of its own: quantizing starts OpenMP's threads, and a process that forked after that hangs.
std::vector<Weights> make_weights(const Options & options) {
    std::vector<ggml_type> types = options.types, kv;
    for (const auto & [k, v] : options.kv) {
        kv.insert(kv.end(), { k, v });
    }
    types.insert(types.end(), kv.begin(), kv.end());
    std::vector<Weights> found;
    for (const ggml_type type : types) {
        if (std::any_of(found.begin(), found.end(), [&](const Weights & each) { return each.type == type; })) {
            continue;
        }
        const auto is_among = [&](const auto & list) { return std::find(list.begin(), list.end(), type) != list.end(); };
        found.push_back({ type,
                          is_among(options.types) ? shared<uint8_t>(ggml_row_size(type, K) * ROWS * EXPERTS) : nullptr,
                          is_among(kv) ? shared<uint8_t>(ggml_row_size(type, HEAD) * CACHED * KV_HEADS) : nullptr });
    }
    const pid_t pid = fork();
    if (pid == 0) {
        const auto rows = numbers(K * ROWS * EXPERTS, 1), cached = numbers(HEAD * CACHED * KV_HEADS, 5);
        for (const Weights & each : found) {
            if (each.rows) {
                quantize(each.type, rows, K, each.rows);
            }
            if (each.cached) {
                quantize(each.type, cached, HEAD, each.cached);
            }
        }
        _exit(0);
    }
    int status = 1;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) {
        fprintf(stderr, "kernel-check: the weights could not be made\n");
        exit(3);
    }
    return found;
}

struct Contexts {
    ggml_context * context;
    explicit Contexts() : context(ggml_init({ ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true })) {}
    ~Contexts() { ggml_free(context); }
};

using Buffer = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;

// The result of one case with its weights in `place`, or nothing where the device does not take them there.
std::vector<float> run(const Case & c, const std::vector<Weights> & all, ggml_backend_t backend,
                       ggml_backend_buffer_type_t place) {
    const auto weights_of = [&](ggml_type type) -> const Weights & {
        return *std::find_if(all.begin(), all.end(), [&](const Weights & each) { return each.type == type; });
    };
    Contexts       own, others;
    ggml_context * o = others.context;
    ggml_tensor *  weights = nullptr;
    ggml_tensor *  result  = nullptr;
    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> inputs;
    const auto give = [&](ggml_tensor * tensor, const void * data) {
        const auto * bytes = static_cast<const uint8_t *>(data);
        inputs.emplace_back(tensor, std::vector<uint8_t>(bytes, bytes + ggml_nbytes(tensor)));
        return tensor;
    };
    const int64_t n = c.columns;
    if (c.op == Op::MUL_MAT) {
        weights        = ggml_new_tensor_2d(own.context, c.type, K, ROWS);
        const auto act = numbers(K * n, 2);
        result         = ggml_mul_mat(o, weights, give(ggml_new_tensor_2d(o, GGML_TYPE_F32, K, n), act.data()));
    } else if (c.op == Op::MUL_MAT_BATCH || c.op == Op::MUL_MAT_HEADS) {
        weights        = c.op == Op::MUL_MAT_HEADS ? ggml_new_tensor_3d(own.context, c.type, K, ROWS, BATCH)
                                                   : ggml_new_tensor_2d(own.context, c.type, K, ROWS);
        const auto act = numbers(K * n * BATCH, 2);
        result         = ggml_mul_mat(o, weights, give(ggml_new_tensor_3d(o, GGML_TYPE_F32, K, n, BATCH), act.data()));
    } else if (c.op == Op::MUL_MAT_ID) {
        weights        = ggml_new_tensor_3d(own.context, c.type, K, ROWS, EXPERTS);
        const auto act = numbers(K * EXPERTS_USED * n, 3);
        auto *     b   = give(ggml_new_tensor_3d(o, GGML_TYPE_F32, K, EXPERTS_USED, n), act.data());
        std::vector<int32_t> chosen(EXPERTS_USED * n);
        for (size_t i = 0; i < chosen.size(); i++) {
            chosen[i] = int32_t((i * 5 + i / EXPERTS_USED) % EXPERTS);
        }
        result = ggml_mul_mat_id(o, weights, b, give(ggml_new_tensor_2d(o, GGML_TYPE_I32, EXPERTS_USED, n), chosen.data()));
    } else {
        const auto query = numbers(HEAD * n * HEADS, 4);
        auto *     q     = give(ggml_new_tensor_3d(o, GGML_TYPE_F32, HEAD, n, HEADS), query.data());
        auto *     k     = give(ggml_new_tensor_3d(o, c.type, HEAD, CACHED, KV_HEADS), weights_of(c.type).cached);
        auto *     v     = give(ggml_new_tensor_3d(o, c.type_v, HEAD, CACHED, KV_HEADS), weights_of(c.type_v).cached);
        std::vector<ggml_fp16_t> mask(CACHED * n);
        for (int64_t row = 0; row < n; row++) {  // causal, as in a prompt: the last row sees all
            for (int64_t key = 0; key < CACHED; key++) {
                mask[row * CACHED + key] = ggml_fp32_to_fp16(key > CACHED - n + row ? -INFINITY : 0.0f);
            }
        }
        result = ggml_flash_attn_ext(o, q, k, v, give(ggml_new_tensor_2d(o, GGML_TYPE_F16, CACHED, n), mask.data()),
                                     1.0f / std::sqrt(float(HEAD)), 0.0f, 0.0f);
        ggml_prec_set_acc(result, GGML_PREC_F32);
    }
    Buffer held(nullptr, ggml_backend_buffer_free);
    if (weights) {
        held.reset(ggml_backend_alloc_ctx_tensors_from_buft(own.context, place));
        if (!held) {
            fprintf(stderr, "kernel-check: no memory in %s\n", ggml_backend_buft_name(place));
            _exit(3);
        }
        ggml_backend_buffer_set_usage(held.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    if (!ggml_backend_dev_supports_op(ggml_backend_get_device(backend), result)) {
        return {};
    }
    ggml_cgraph * graph = ggml_new_graph(o);
    ggml_build_forward_expand(graph, result);
    Buffer buffer(ggml_backend_alloc_ctx_tensors(o, backend), ggml_backend_buffer_free);
    if (weights) {
        ggml_backend_tensor_set(weights, weights_of(c.type).rows, 0, ggml_nbytes(weights));
    }
    for (auto & [tensor, bytes] : inputs) {
        ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
    }
    // No numbers: memory is used again, and what a kernel forgets to write would be the last place's right result.
    ggml_backend_tensor_memset(result, 0xff, 0, ggml_nbytes(result));
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        fprintf(stderr, "kernel-check: %s was not computed\n", describe(c, ggml_backend_buft_name(place)).c_str());
        _exit(3);
    }
    std::vector<float> found(ggml_nelements(result));
    ggml_backend_tensor_get(result, found.data(), 0, found.size() * sizeof(float));
    return found;
}

// Sum of squared differences over the sum of the reference's squares; not finite where a result is not.
double nmse(const float * reference, const std::vector<float> & found) {
    double difference = 0, whole = 0;
    for (size_t i = 0; i < found.size(); i++) {
        difference += (double(found[i]) - reference[i]) * (double(found[i]) - reference[i]);
        whole += double(reference[i]) * reference[i];
    }
    return difference / whole;
}

[[noreturn]] void child(const Options & options, const std::string & variant, const std::vector<Case> & cases,
                        const std::vector<Weights> & weights, float * reference, bool is_reference, bool is_compared,
                        Outcome * outcome) {
    alarm(CHILD_TIMEOUT_S);
    const std::string path = options.dir + "/libggml-cpu-" + variant + ".so";
    snprintf(outcome->at, sizeof outcome->at, "loading libggml-cpu-%s.so", variant.c_str());
    void * library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "kernel-check: %s\n", dlerror());
        outcome->is_unloadable = 1;
        _exit(0);
    }
    const auto score = reinterpret_cast<int (*)()>(dlsym(library, "ggml_backend_score"));
    if (score && score() == 0) {
        outcome->is_refused = 1;
        _exit(0);
    }
    ggml_backend_reg_t registry = ggml_backend_load(path.c_str());
    if (!registry) {
        outcome->is_unloadable = 1;
        _exit(0);
    }
    ggml_backend_dev_t device  = ggml_backend_reg_dev_get(registry, 0);
    ggml_backend_t     backend = ggml_backend_dev_init(device, nullptr);
    const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
    set_threads(backend, options.threads);

    std::vector<ggml_backend_buffer_type_t> places = { ggml_backend_dev_buffer_type(device) };
    const auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
    for (auto * each = extra && !is_reference ? extra(device) : nullptr; each && *each; each++) {
        places.push_back(*each);
    }
    for (const Case & c : cases) {
        for (size_t i = 0; i < (c.op == Op::FLASH_ATTN_EXT ? 1 : places.size()); i++) {
            snprintf(outcome->at, sizeof outcome->at, "%s", describe(c, ggml_backend_buft_name(places[i])).c_str());
            const std::vector<float> found = run(c, weights, backend, places[i]);
            if (found.empty()) {
                continue;
            }
            outcome->cases++;
            if (is_reference) {
                std::copy(found.begin(), found.end(), reference + c.offset);
                continue;
            }
            const double error = is_compared ? nmse(reference + c.offset, found) : 0.0;
            const bool   is_number = std::all_of(found.begin(), found.end(), [](float x) { return std::isfinite(x); });
            const double counted = is_number && std::isfinite(error) ? error : INFINITY;
            if (outcome->cases == 1 || counted > outcome->worst) {
                outcome->worst = counted;
                memcpy(outcome->worst_at, outcome->at, sizeof outcome->at);
            }
        }
    }
    outcome->is_done = 1;
    _exit(0);
}

struct Ending {
    Outcome outcome;
    int     status;  // as waitpid has it
    double  seconds;
};

Ending run_child(const Options & options, const std::string & variant, const std::vector<Case> & cases,
                 const std::vector<Weights> & weights, float * reference, bool is_reference, bool is_compared) {
    auto * outcome = shared<Outcome>(1);  // zeros, as the kernel gives them
    const auto  began = std::chrono::steady_clock::now();
    const pid_t pid   = fork();
    if (pid < 0) {
        perror("kernel-check: fork");
        exit(3);
    }
    if (pid == 0) {
        child(options, variant, cases, weights, reference, is_reference, is_compared, outcome);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    Ending ending{ *outcome, status, took.count() };
    munmap(outcome, sizeof(Outcome));
    return ending;
}

// True when the variant is in order.
bool report(const std::string & variant, const Ending & ending, bool is_compared) {
    const Outcome & o = ending.outcome;
    const char *    status = "ok";
    std::string     signal_name = "null";
    std::string     at = o.worst_at;
    if (WIFSIGNALED(ending.status)) {
        const char * name = sigabbrev_np(WTERMSIG(ending.status));
        signal_name = std::string("\"SIG") + (name ? name : std::to_string(WTERMSIG(ending.status)).c_str()) + "\"";
        status      = "died";
        at          = o.at;
    } else if (o.is_unloadable) {
        status = "unloadable";
        at     = o.at;
    } else if (o.is_refused) {
        status = "refused";
        at     = o.at;
    } else if (!o.is_done) {
        status = "died";  // with an exit of its own: an assertion that ends in _exit, a lack of memory
        at     = o.at;
    } else if (!(o.worst <= LIMIT)) {
        status = "wrong";
    }
    printf("{\"variant\": \"%s\", \"status\": \"%s\", \"cases\": %d, \"worst_nmse\": ", variant.c_str(), status, o.cases);
    if (std::isfinite(o.worst)) {
        printf("%.3g", o.worst);
    } else {
        printf("null");  // JSON knows no infinity
    }
    printf(", \"limit\": %g, \"at\": \"%s\", \"signal\": %s, \"compared\": %s, \"seconds\": %.2f}\n", LIMIT, at.c_str(),
           signal_name.c_str(), is_compared ? "true" : "false", ending.seconds);
    fflush(stdout);
    return strcmp(status, "ok") == 0;
}

[[noreturn]] void usage(const std::string & what) {
    fprintf(stderr, "error: %s\n\nhint: kernel-check --dir /opt/llama --variant haswell,x64 [--reference x64] "
                    "[--types q4_0,f16|simple|all] [--kv f16,q8_0,q8_0/q4_0|all] [--columns 1,8,512] [--threads 2]\n", what.c_str());
    exit(2);
}

std::vector<std::string> split(const std::string & text, char at) {
    std::vector<std::string> parts;
    std::istringstream       stream(text);
    for (std::string part; std::getline(stream, part, at);) {
        if (!part.empty()) {
            parts.push_back(part);
        }
    }
    return parts;
}

// Types on a lattice: the tables for making weights of them take seconds, in an emulated CPU minutes.
bool is_on_lattice(ggml_type type) {
    switch (type) {
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ3_S:
            return true;
        default:
            return false;
    }
}

std::vector<ggml_type> known_types() {
    std::vector<ggml_type> found;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        if (is_of_files(ggml_type(i))) {
            found.push_back(ggml_type(i));
        }
    }
    return found;
}

ggml_type type_called(const std::string & name) {
    for (const ggml_type type : known_types()) {
        if (strcasecmp(ggml_type_name(type), name.c_str()) == 0) {
            return type;
        }
    }
    usage("no type of weights is called that: " + name);
}

Options parse(int argc, char ** argv) {
    Options     options;
    std::string types = "all", kv = "all";
    for (int i = 1; i < argc; i++) {
        const std::string flag = argv[i];
        if (i + 1 == argc) {
            usage("a value is missing after: " + flag);
        }
        const std::string value = argv[++i];
        if (flag == "--dir") {
            options.dir = value;
        } else if (flag == "--variant") {
            options.variants = split(value, ',');
        } else if (flag == "--reference") {
            options.reference = value;
        } else if (flag == "--types") {
            types = value;
        } else if (flag == "--kv") {
            kv = value;
        } else if (flag == "--columns") {
            options.columns.clear();
            for (const auto & count : split(value, ',')) {
                options.columns.push_back(atoi(count.c_str()));
                if (options.columns.back() < 1 || options.columns.back() > CACHED) {
                    usage("--columns takes numbers from 1 to 512: " + value);
                }
            }
        } else if (flag == "--threads") {
            options.threads = atoi(value.c_str());
        } else {
            usage("unknown flag: " + flag);
        }
    }
    if (options.variants.empty()) {
        usage("no variant is named");
    }
    for (const auto & name : options.variants) {
        if (name.find_first_of("/\"\\") != std::string::npos) {
            usage("no name of a variant: " + name);
        }
    }
    if (options.threads < 1 || options.threads > 1024) {
        usage("--threads is no number of threads");
    }
    if (types == "all" || types == "simple") {
        options.types = known_types();
        if (types == "simple") {
            options.types.erase(std::remove_if(options.types.begin(), options.types.end(), is_on_lattice),
                                options.types.end());
        }
    } else {
        for (const auto & name : split(types, ',')) {
            options.types.push_back(type_called(name));
        }
    }
    if (kv == "all") {
        kv = "f32,f16,bf16,q8_0,q5_1,q5_0,q4_1,q4_0,iq4_nl,q8_0/q4_0";
    }
    for (const auto & pair : split(kv, ',')) {
        const auto both = split(pair, '/');
        options.kv.emplace_back(type_called(both[0]), type_called(both.back()));
    }
    return options;
}

}  // namespace

int main(int argc, char ** argv) {
    const Options options = parse(argc, argv);
    ggml_log_set([](ggml_log_level level, const char * text, void *) {  // not a line for each matrix that is repacked
        if (level >= GGML_LOG_LEVEL_WARN) {
            fputs(text, stderr);
        }
    }, nullptr);

    std::vector<Case> cases;
    size_t            total = 0;
    const auto add = [&](Op op, ggml_type type, ggml_type type_v, int columns, int64_t rows) {
        cases.push_back({ op, type, type_v, columns, total, size_t(rows) });
        total += size_t(rows);
    };
    for (const int n : options.columns) {
        for (const ggml_type type : options.types) {
            add(Op::MUL_MAT, type, type, n, ROWS * n);
            if (n < 512) {  // the loop around the products is what differs
                add(Op::MUL_MAT_BATCH, type, type, n, ROWS * n * BATCH);
                add(Op::MUL_MAT_HEADS, type, type, n, ROWS * n * BATCH);
            }
            add(Op::MUL_MAT_ID, type, type, n, ROWS * EXPERTS_USED * n);
        }
        for (const auto & [k, v] : options.kv) {
            add(Op::FLASH_ATTN_EXT, k, v, n, HEAD * HEADS * n);
        }
    }

    const std::vector<Weights> weights   = make_weights(options);
    auto *                     reference = shared<float>(total);
    const Ending first       = run_child(options, options.reference, cases, weights, reference, true, false);
    const bool   is_compared = first.outcome.is_done != 0;
    if (!is_compared) {
        fprintf(stderr, "kernel-check: nothing to compare with: the reference %s did not run: %s\n",
                options.reference.c_str(), first.outcome.at);
    }
    bool is_ok = true;
    for (const auto & variant : options.variants) {
        is_ok &= report(variant, run_child(options, variant, cases, weights, reference, false, is_compared), is_compared);
    }
    return is_ok ? 0 : 1;
}
