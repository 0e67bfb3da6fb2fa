/* tiny_mla.c - a small language model that runs on an FP8 cache, and what the FP8 costs it

   A byte-level MLA model of 4.3 M parameters (CARD.md) reads and writes text token by token.  Its
   cache is kept in the SnapMLA format by snapmla's append and decode: on the GPU through
   snapmla.cuh, or on the CPU through the reference snapmla_ref.h.  The program continues two
   prompts, then scores a novel that the model has not seen with three cache formats: BF16, SnapMLA,
   and the naive FP8 cache with one scale for everything.

   Compile, in this folder.  CPU only:
       cc -O3 -std=c99 *.c -o tiny_mla -lm -lpthread
   with the GPU (sm_90a is Hopper; name your own architecture):
       nvcc -O3 -std=c++17 -arch=sm_90a -DTINY_MLA_GPU *.c *.cu -o tiny_mla

   Run:
       ./tiny_mla              text, then the table of formats      ./tiny_mla --help
       ./tiny_mla --check      the same against the values of CARD.md; exit code 1 on a failure

   Expect the snap cache within 0.1 % of the bf16 cache, and the naive one several times further
   away.  On a CPU, 16384 bytes in windows of 256:
       bf16   1152 bytes/token/layer   1.64325 bits/byte
       snap    644                     1.64419             +0.057%
       naive   576                     1.64806             +0.293%  */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tiny_mla.h"

static const struct {
    const char *name, *meaning;
    int token_bytes; /* in one layer */
} formats[CACHE_FORMATS] = {
    {"fp32", "latent and rope in FP32", 4 * ROW},
    {"bf16", "latent and rope in BF16", 2 * ROW},
    {"snap", "SnapMLA: e4m3 latent, scale per token, BF16 rope", LATENT + 4 + 2 * ROPE},
    {"naive", "e4m3 latent and rope, one scale per layer", ROW},
};

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---------------------------------------------------------------------------------------------
   From logits to a token */

/* Natural logs of the probabilities; -1 when a logit is not finite. */
static int log_softmax(const float *logits, double *logp)
{
    double top = logits[0], sum = 0;
    for (int i = 0; i < VOCAB; i++) {
        if (!isfinite(logits[i])) return -1;
        top = logits[i] > top ? logits[i] : top;
    }
    for (int i = 0; i < VOCAB; i++) sum += exp(logits[i] - top);
    sum = top + log(sum);
    for (int i = 0; i < VOCAB; i++) logp[i] = logits[i] - sum;
    return 0;
}

/* The k most probable tokens, best first: insertion into a sorted list. */
static void top_tokens(const double *logp, int k, int *best)
{
    for (int i = 0, n = 0; i < VOCAB; i++) {
        int at;
        if (n == k && logp[i] <= logp[best[k - 1]]) continue;
        for (at = n < k ? n++ : k - 1; at > 0 && logp[i] > logp[best[at - 1]]; at--)
            best[at] = best[at - 1];
        best[at] = i;
    }
}

/* A number in [0, 1): splitmix64. */
static double uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

/* temperature 0 takes the most probable token. */
static int pick(const double *logp, double temperature, int top_k, uint64_t *state)
{
    int best[VOCAB];
    double weight[VOCAB], sum = 0, at;

    top_tokens(logp, top_k, best);
    if (temperature == 0) return best[0];
    for (int i = 0; i < top_k; i++)
        sum += weight[i] = exp((logp[best[i]] - logp[best[0]]) / temperature);
    at = uniform(state) * sum;
    for (int i = 0; i < top_k; i++)
        if ((at -= weight[i]) < 0) return best[i];
    return best[0];
}

/* ---------------------------------------------------------------------------------------------
   Text */

/* Feed byte 0 and the prompt, then write `count` bytes of continuation.  0 or -1. */
static int generate(const backend *b, cache_format format, const uint8_t *prompt, int prompt_bytes,
                    int count, double temperature, int top_k, uint64_t seed, uint8_t *text)
{
    session *s = b->open(b, format, NULL, 1, prompt_bytes + count + 1);
    float logits[VOCAB];
    double logp[VOCAB];
    int failed = !s;

    for (int t = 0; t < prompt_bytes + count && !failed; t++) {
        uint8_t token = 0;
        if (t > 0) token = t <= prompt_bytes ? prompt[t - 1] : text[t - 1 - prompt_bytes];
        failed = b->step(s, &token, logits);
        if (!failed && t >= prompt_bytes) {
            failed = log_softmax(logits, logp);
            if (!failed) text[t - prompt_bytes] = (uint8_t)pick(logp, temperature, top_k, &seed);
        }
    }
    b->close(s);
    return failed ? -1 : 0;
}

/* log p of what follows byte 0 and the prompt, and the prompt's own -log p.  0 or -1. */
static int read_prompt(const backend *b, cache_format format, const char *prompt, double *logp,
                       double *nll)
{
    int n = (int)strlen(prompt), failed;
    session *s = b->open(b, format, NULL, 1, n + 1);
    float logits[VOCAB];

    failed = !s;
    *nll = 0;
    for (int t = 0; t <= n && !failed; t++) {
        uint8_t token = t ? (uint8_t)prompt[t - 1] : 0;
        failed = b->step(s, &token, logits) || log_softmax(logits, logp);
        if (!failed && t < n) *nll -= logp[(uint8_t)prompt[t]];
    }
    b->close(s);
    return failed ? -1 : 0;
}

/* ---------------------------------------------------------------------------------------------
   Scoring: the text is cut into windows, and each window is a request of its own that starts with
   byte 0 and an empty cache.  All windows of a session advance together, one token a step. */

typedef struct scoring {
    const backend *backend;
    cache_format format;
    const calibration *scales; /* for CACHE_NAIVE */
    calibration *seen;         /* from CACHE_BF16, of the first window; may be NULL */
    const uint8_t *text;
    int64_t bytes;
    int context; /* bytes in a window; the last one may be shorter */
    int batch, threads;
    double *nats; /* of each window */
    int show_progress;
} scoring;

typedef struct scorer { /* one thread */
    scoring *job;
    int index, started, failed;
    pthread_t thread;
} scorer;

static int score_windows(scoring *j, int first, int count)
{
    const backend *b = j->backend;
    const uint8_t *text = j->text + (int64_t)first * j->context;
    int64_t left = j->bytes - (int64_t)first * j->context;
    int steps = left < j->context ? (int)left : j->context;
    session *s = b->open(b, j->format, j->scales, count, steps);
    uint8_t *tokens = (uint8_t *)malloc((size_t)count);
    float *logits = (float *)malloc((size_t)count * VOCAB * sizeof(float));
    double logp[VOCAB];
    int failed = !s || !tokens || !logits;

    for (int t = 0; t < steps && !failed; t++) {
        for (int w = 0; w < count; w++) {
            int64_t at = (int64_t)w * j->context + t;
            tokens[w] = t == 0 || at >= left ? 0 : text[at - 1];
        }
        failed = b->step(s, tokens, logits);
        for (int w = 0; w < count && !failed; w++) {
            int64_t at = (int64_t)w * j->context + t;
            if (at >= left) break;
            failed = log_softmax(logits + w * VOCAB, logp);
            j->nats[first + w] -= failed ? 0 : logp[text[at]];
        }
        if (j->show_progress && first == 0 && (t % 16 == 0 || t == steps - 1))
            fprintf(stderr, "\r%s: token %d of %d in %d windows ", formats[j->format].name, t + 1,
                    steps, count);
    }
    if (!failed && first == 0 && j->seen) failed = b->calibrate(s, j->seen);
    b->close(s);
    free(tokens);
    free(logits);
    return failed;
}

static void *scorer_main(void *argument)
{
    scorer *me = (scorer *)argument;
    scoring *j = me->job;
    int windows = (int)((j->bytes + j->context - 1) / j->context);
    for (int first = me->index * j->batch; first < windows && !me->failed;
         first += j->threads * j->batch)
        me->failed =
            score_windows(j, first, windows - first < j->batch ? windows - first : j->batch);
    return NULL;
}

/* Bits per byte of the text; 0 or -1. */
static int score(const backend *b, cache_format format, const calibration *scales,
                 calibration *seen, const uint8_t *text, int64_t bytes, int context,
                 int show_progress, double *bits_per_byte)
{
    int windows = (int)((bytes + context - 1) / context), failed = 0;
    scoring j = {b, format, scales, seen, text, bytes, context, 0, 0, NULL, show_progress};
    scorer *scorers;
    double nats = 0;

    j.threads = b->threads < windows ? b->threads : windows;
    j.batch = (windows + j.threads - 1) / j.threads;
    j.batch = j.batch < b->max_requests ? j.batch : b->max_requests;
    j.nats = (double *)calloc((size_t)windows, sizeof(double));
    scorers = (scorer *)calloc((size_t)j.threads, sizeof *scorers);
    if (!j.nats || !scorers) failed = 1;
    for (int i = 0; i < j.threads && !failed; i++) {
        scorers[i].job = &j;
        scorers[i].index = i;
        if (i > 0)
            scorers[i].started =
                !pthread_create(&scorers[i].thread, NULL, scorer_main, &scorers[i]);
    }
    /* The calling thread is the first worker, and does what a thread that did not start would. */
    for (int i = 0; i < j.threads && !failed; i++) {
        if (scorers[i].started)
            pthread_join(scorers[i].thread, NULL);
        else
            scorer_main(&scorers[i]);
    }
    for (int i = 0; i < j.threads && scorers; i++) failed |= scorers[i].failed;
    for (int w = 0; w < windows && j.nats; w++) nats += j.nats[w];
    if (show_progress) fprintf(stderr, "\r%60s\r", "");
    *bits_per_byte = nats / (double)bytes / log(2);
    free(j.nats);
    free(scorers);
    return failed ? -1 : 0;
}

/* ---------------------------------------------------------------------------------------------
   What CARD.md says about the model, computed with PyTorch */

enum { CARD_PROMPTS = 3, CARD_TOP = 5 };

static const struct {
    const char *prompt;
    char token[CARD_TOP + 1]; /* the most probable next bytes, FP32 */
    double logp[CARD_TOP];
    double nll;        /* of the prompt, FP32 */
    double bf16, snap; /* log p of the first token, 0 = not listed */
    /* clang-format off */
} card[CARD_PROMPTS] = {
    {"It is a truth universally acknowledged, that a", "l ntc",
     {-1.152369, -1.587765, -2.108013, -2.593080, -2.877616}, 55.659194, -1.15365, -1.17506},
    {"In the beginning God created", " ,.:\n",
     {-0.064039, -3.622843, -3.682777, -5.271405, -6.215176}, 40.614400, 0, -0.06120},
    {"The function returns a pointer to the", " \nsim",
     {-0.004794, -5.513193, -7.959162, -8.696826, -8.811196}, 21.800852, 0, -0.00485},
};
/* clang-format on */

/* The whole excerpt in windows of 4096 */
static const double card_bits_per_byte[CACHE_FORMATS] = {1.46823, 1.46822, 1.46893, 1.47538};

/* FP32 differs from the card only by the order of sums.  In a rounded format that order also
   decides which way near-ties go, and values move by as much as the format costs. */
static const double card_tolerance[CACHE_FORMATS] = {2e-3, 5e-3, 5e-2, 0};

static const char *shown(int byte)
{
    static char text[8];
    if (byte == '\n') return "\\n";
    snprintf(text, sizeof text, byte >= 0x20 && byte < 0x7f ? "%c" : "\\x%02x", byte);
    return text;
}

static int check(const char *what, double value, double expected, double tolerance)
{
    int passed = fabs(value - expected) <= tolerance; /* NaN fails */
    printf("%s  %-34s %11.6f  expected %11.6f +- %g\n", passed ? "PASS" : "FAIL", what, value,
           expected, tolerance);
    return passed ? 0 : 1;
}

/* The number of values that differ from the card, or -1 when the backend fails. */
static int check_prompts(const backend *b)
{
    int failures = 0;
    for (int p = 0; p < CARD_PROMPTS; p++) {
        printf("\"%s\"\n", card[p].prompt);
        for (int f = CACHE_FP32; f <= CACHE_SNAP; f++) {
            const double *listed = f == CACHE_FP32   ? card[p].logp
                                   : f == CACHE_BF16 ? &card[p].bf16
                                                     : &card[p].snap;
            double logp[VOCAB], nll;
            char what[64];
            if (read_prompt(b, (cache_format)f, card[p].prompt, logp, &nll)) return -1;
            for (int i = 0; i < (f == CACHE_FP32 ? CARD_TOP : 1) && listed[i] != 0; i++) {
                snprintf(what, sizeof what, "%s: log p of '%s'", formats[f].name,
                         shown(card[p].token[i]));
                failures +=
                    check(what, logp[(uint8_t)card[p].token[i]], listed[i], card_tolerance[f]);
            }
            if (f == CACHE_FP32)
                failures +=
                    check("fp32: -log p of the prompt", nll, card[p].nll, card_tolerance[f]);
        }
    }
    return failures;
}

/* ---------------------------------------------------------------------------------------------
   The program */

typedef struct options {
    const char *model, *prompt;
    int tokens, top_k, context, cpu, check, logprobs, full;
    int64_t bytes; /* -1: the backend's default */
    uint64_t seed;
    double temperature;
} options;

static const char help[] =
    "usage: tiny_mla [options]\n"
    "  --model DIR      folder of config.json, model.safetensors, excerpt.txt\n"
    "                   (default: examples/tiny_mla, else the current folder)\n"
    "  --prompt TEXT    text to continue (default: a short one, then 1 KB of the excerpt)\n"
    "  --tokens N       bytes to write (default 200)\n"
    "  --temp T         sampling temperature, 0 = greedy only (default 0.6)\n"
    "  --top-k K        sample among the K most probable bytes (default 40)\n"
    "  --seed N         of the sampling (default 1)\n"
    "  --bytes N        bytes of the excerpt to score, 0 = none (default: all on a GPU, 16384 on\n"
    "                   a CPU)\n"
    "  --context N      bytes in a window of the scoring (default: 2048 on a GPU, 256 on a CPU)\n"
    "  --full           score the whole excerpt at context 4096; made for a GPU\n"
    "  --cpu            do not use a GPU\n"
    "  --check          compare with the values of CARD.md, exit code 1 when one is off\n"
    "  --logprobs       print the most probable continuations of CARD.md's prompts and end\n"
    "  --help           this text\n";

static int usage_error(const char *what, const char *argument)
{
    fprintf(stderr, "tiny_mla: %s%s (--help lists the options)\n", argument, what);
    return -1;
}

static int parse_number(const char *text, double low, double high, double *number)
{
    char *end;
    *number = strtod(text, &end);
    return end != text && *end == 0 && *number >= low && *number <= high ? 0 : -1;
}

/* 0, 1 when the program is to end at once, -1 after a line on stderr. */
static int parse_options(options *o, int argc, char **argv)
{
    const struct {
        const char *name;
        int *flag;
    } flags[] = {{"--cpu", &o->cpu},
                 {"--check", &o->check},
                 {"--logprobs", &o->logprobs},
                 {"--full", &o->full}};

    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = argv[i + 1];
        double x = 0;
        int known = 0, bad = 0;

        if (!strcmp(name, "--help")) {
            fputs(help, stdout);
            return 1;
        }
        for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++)
            if (!strcmp(name, flags[f].name)) *flags[f].flag = known = 1;
        if (known) continue;
        i++; /* all others take a value */
        if (!strcmp(name, "--model"))
            o->model = value;
        else if (!strcmp(name, "--prompt"))
            o->prompt = value;
        else if (!strcmp(name, "--tokens") && !(bad = !value || parse_number(value, 0, 8000, &x)))
            o->tokens = (int)x;
        else if (!strcmp(name, "--temp") && !(bad = !value || parse_number(value, 0, 100, &x)))
            o->temperature = x;
        else if (!strcmp(name, "--top-k") && !(bad = !value || parse_number(value, 1, VOCAB, &x)))
            o->top_k = (int)x;
        else if (!strcmp(name, "--seed") && !(bad = !value || parse_number(value, 0, 1e15, &x)))
            o->seed = (uint64_t)x;
        else if (!strcmp(name, "--bytes") && !(bad = !value || parse_number(value, 0, 1e9, &x)))
            o->bytes = (int64_t)x;
        else if (!strcmp(name, "--context") && !(bad = !value || parse_number(value, 2, 65536, &x)))
            o->context = (int)x;
        else if (!bad)
            return usage_error(": unknown option", name);
        if (!value) return usage_error(" needs a value", name);
        if (bad) return usage_error(": its value is no number, or out of range", name);
    }
    return 0;
}

static void print_text(const uint8_t *text, int n)
{
    for (int i = 0; i < n; i++)
        putchar((text[i] >= 0x20 && text[i] < 0x7f) || text[i] == '\n' ? text[i] : '?');
    putchar('\n');
}

/* The end of a prompt, on one line. */
static void print_prompt_end(const uint8_t *prompt, int n)
{
    int first = n > 60 ? n - 60 : 0;
    printf("\"%s", first ? "..." : "");
    for (int i = first; i < n; i++) fputs(shown(prompt[i]), stdout);
    printf("\"\n");
}

/* One continuation with the SnapMLA cache; the greedy one is compared with the BF16 cache's. */
static int write_text(const backend *b, const options *o, const uint8_t *prompt, int prompt_bytes,
                      double temperature)
{
    uint8_t *text = (uint8_t *)calloc(2, (size_t)o->tokens + 1);
    double start = seconds(), spent;
    int n = o->tokens, failed = !text;

    if (temperature == 0)
        printf("--- greedy, SnapMLA cache, after ");
    else
        printf("--- sampled (temperature %g, top-k %d, seed %llu), SnapMLA cache, after ",
               temperature, o->top_k, (unsigned long long)o->seed);
    print_prompt_end(prompt, prompt_bytes);
    fflush(stdout);
    failed = failed ||
             generate(b, CACHE_SNAP, prompt, prompt_bytes, n, temperature, o->top_k, o->seed, text);
    spent = seconds() - start;
    if (!failed) {
        print_text(text, n);
        printf("(%d bytes read and %d written in %.1f s", prompt_bytes, n, spent);
    }
    if (!failed && temperature == 0) {
        uint8_t *other = text + n + 1;
        int same = 0;
        failed = generate(b, CACHE_BF16, prompt, prompt_bytes, n, 0, o->top_k, 0, other);
        while (same < n && text[same] == other[same]) same++;
        if (same == n)
            printf("; the BF16 cache writes the same");
        else
            printf("; the BF16 cache writes something else from byte %d on", same + 1);
    }
    printf(failed ? "\n" : ")\n\n");
    free(text);
    return failed ? -1 : 0;
}

static int print_logprobs(const backend *b)
{
    for (int p = 0; p < CARD_PROMPTS; p++) {
        printf("\"%s\"\n", card[p].prompt);
        for (int f = CACHE_FP32; f <= CACHE_SNAP; f++) {
            double logp[VOCAB], nll;
            int best[CARD_TOP];
            if (read_prompt(b, (cache_format)f, card[p].prompt, logp, &nll)) return -1;
            top_tokens(logp, CARD_TOP, best);
            printf("  %-5s", formats[f].name);
            for (int i = 0; i < CARD_TOP; i++) printf("  '%s' %.6f", shown(best[i]), logp[best[i]]);
            printf("   -log p of the prompt %.6f\n", nll);
        }
    }
    return 0;
}

/* Score with three formats, print the table and, with --check, hold it to the promises. */
static int compare_formats(const backend *b, const options *o, const uint8_t *text, int64_t bytes,
                           int context)
{
    calibration seen;
    double bits[CACHE_FORMATS] = {0}, loss;
    int failures = 0, whole = bytes == 245760 && context == 4096;

    memset(&seen, 0, sizeof seen);
    printf("--- excerpt.txt, %lld bytes in windows of %d, each with a cache of its own\n",
           (long long)bytes, context);
    printf("format  bytes/token/layer  bits/byte   vs bf16  %8s  cache row\n", "time");
    for (int f = CACHE_BF16; f <= CACHE_NAIVE; f++) {
        double start = seconds();
        fflush(stdout);
        if (score(b, (cache_format)f, &seen, f == CACHE_BF16 ? &seen : NULL, text, bytes, context,
                  isatty(STDERR_FILENO), &bits[f]))
            return -1;
        printf("%-7s %17d  %9.5f  %+7.3f%%  %6.1f s  %s\n", formats[f].name, formats[f].token_bytes,
               bits[f], 100 * (bits[f] / bits[CACHE_BF16] - 1), seconds() - start,
               formats[f].meaning);
    }
    if (!o->check) return 0;

    loss = bits[CACHE_SNAP] / bits[CACHE_BF16] - 1;
    printf("\n");
    if (bytes < 65536) {
        printf("SKIP  snap within 0.1%% of bf16: needs --bytes 65536 or more to be visible\n");
    } else {
        failures += check("snap / bf16 - 1", loss, 0, 1e-3);
        failures += check("naive is worse than snap (1 = yes)",
                          bits[CACHE_NAIVE] - bits[CACHE_BF16] >
                              2 * fabs(bits[CACHE_SNAP] - bits[CACHE_BF16]),
                          1, 0);
    }
    for (int f = CACHE_BF16; f <= CACHE_NAIVE && whole; f++)
        failures +=
            check(formats[f].name, bits[f], card_bits_per_byte[f], f == CACHE_NAIVE ? 2e-3 : 5e-4);
    return failures;
}

/* The GPU where there is one and the CPU elsewhere; says which. */
static int choose_backend(backend *b, const model *m, const options *o)
{
#ifdef TINY_MLA_GPU
    const char *reason = o->cpu ? "--cpu was given" : gpu_backend(b, m);
    if (!reason) {
        printf("running on %s\n\n", b->label);
        return 0;
    }
#else
    const char *reason = o->cpu ? "--cpu was given" : "this program was built without it";
#endif
    if (cpu_backend(b, m)) return -1;
    b->threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    b->threads = b->threads < 1 ? 1 : b->threads > 64 ? 64 : b->threads;
    printf("running on %s, %d threads; no GPU is used: %s\n\n", b->label, b->threads, reason);
    return 0;
}

/* 0, the number of failed checks, or -1 when the backend fails. */
static int run(const backend *b, const model *m, const options *o, const uint8_t *excerpt,
               int64_t excerpt_bytes)
{
    static const char opening[] = "In the beginning God created", scene[] = "Chapter 3\n\n\"";
    enum { SCENE_BYTES = 1024 + sizeof scene };
    const int context = o->full ? 4096 : o->context ? o->context : b->score_context;
    int64_t bytes = o->full ? excerpt_bytes : o->bytes >= 0 ? o->bytes : b->score_bytes;
    int failures = 0, failed = 0;

    if (context > m->max_context || o->tokens + SCENE_BYTES >= m->max_context ||
        (o->prompt && strlen(o->prompt) + (size_t)o->tokens >= (size_t)m->max_context)) {
        fprintf(stderr, "tiny_mla: the model's context is %d tokens, less than asked for\n",
                m->max_context);
        return 1;
    }
    if (o->logprobs) return print_logprobs(b);
    if (o->check) {
        if ((failures = check_prompts(b)) < 0) return -1;
        printf("\n");
    }
    if (o->tokens > 0) {
        const uint8_t *prompt = (const uint8_t *)(o->prompt ? o->prompt : opening);
        uint8_t long_prompt[SCENE_BYTES];
        int n = (int)strlen((const char *)prompt);

        failed = write_text(b, o, prompt, n, 0);
        if (!o->prompt) { /* sampled text gains from a long prompt: paragraphs, then a heading */
            for (n = excerpt_bytes < 1024 ? (int)excerpt_bytes : 1024; n > 1; n--)
                if (excerpt[n - 1] == '\n' && excerpt[n - 2] == '\n') break;
            memcpy(long_prompt, excerpt, (size_t)n);
            memcpy(long_prompt + n, scene, sizeof scene - 1);
            prompt = long_prompt;
            n += (int)sizeof scene - 1;
        }
        if (!failed && o->temperature > 0) failed = write_text(b, o, prompt, n, o->temperature);
    }
    if (bytes > excerpt_bytes) bytes = excerpt_bytes;
    if (bytes == 0 && o->bytes != 0) printf("excerpt.txt is empty: there is nothing to score\n");
    if (!failed && bytes > 0) {
        int more = compare_formats(b, o, excerpt, bytes, context);
        failed = more < 0;
        failures += more;
    }
    if (!failed && o->check)
        printf("%s\n", failures ? "some values are off" : "all values as expected");
    return failed ? -1 : failures;
}

int tiny_mla_main(int argc, char **argv);

int tiny_mla_main(int argc, char **argv)
{
    options o = {NULL, NULL, 200, 40, 0, 0, 0, 0, 0, -1, 1, 0.6};
    char error[ERROR_CHARS], path[1024];
    char *excerpt = NULL;
    size_t excerpt_bytes = 0;
    model m;
    backend b;
    int result = parse_options(&o, argc, argv);

    if (result) return result < 0;
    if (!o.model)
        o.model = access("examples/tiny_mla/config.json", R_OK) ? "." : "examples/tiny_mla";
    if (model_load(&m, o.model, error)) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    snprintf(path, sizeof path, "%s/excerpt.txt", o.model);
    if (!(excerpt = read_file(path, &excerpt_bytes, error))) {
        fprintf(stderr, "%s\n", error);
        result = 1;
    } else {
        printf("tiny MLA model: %lld parameters, %d layers, %d heads, latent %d, rope %d\n",
               (long long)m.parameters, m.layers, m.heads, LATENT, ROPE);
        result = choose_backend(&b, &m, &o);
        if (!result) {
            result = run(&b, &m, &o, (const uint8_t *)excerpt, (int64_t)excerpt_bytes);
            b.free(&b);
        }
        if (result < 0)
            fprintf(stderr, "tiny_mla: out of memory, a device error, or logits that are not "
                            "finite\n");
    }
    free(excerpt);
    model_free(&m);
    return result != 0;
}

#ifndef TINY_MLA_NO_MAIN
int main(int argc, char **argv) { return tiny_mla_main(argc, argv); }
#endif
