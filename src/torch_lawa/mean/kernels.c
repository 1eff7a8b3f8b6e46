/* The inner loops of the offline mean: bytes to float64 sums and back, bit for bit the same as
 * kernels_numpy.py. At the end: mappings of files that survive the truncation of the file.
 *
 * Plain C without Python headers: compiled when the package is built, if there is a compiler, and
 * loaded with ctypes. Must be compiled without contraction of multiply and add (-ffp-contract=off)
 * and without -ffast-math.
 *
 * Each function that Python calls computes in the default floating-point environment and restores
 * the caller's: a process may flush subnormal numbers to zero (torch.set_flush_denormal, libraries
 * built with -ffast-math), which would lose every float16 below 2^-14. */

#define _GNU_SOURCE /* signals and mappings */
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES \
  __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__linux__)
#define CLONES __attribute__((noinline, target_clones("avx512f", "avx2", "default")))
#else
#define CLONES __attribute__((noinline))
#endif

/* The control register: rounding mode, flush-to-zero, and on x86 the exception flags. The arithmetic
 * is in functions that are not inlined, so none of it moves across these. */
#if defined(__x86_64__)
typedef uint32_t control;
static inline control read_control(void) {
  control value;
  __asm__ volatile("stmxcsr %0" : "=m"(value) : : "memory");
  return value;
}
static inline void write_control(control value) {
  __asm__ volatile("ldmxcsr %0" : : "m"(value) : "memory");
}
enum { DEFAULT_CONTROL = 0x1f80 }; /* all exceptions masked, to nearest, no flushing */
#elif defined(__aarch64__)
typedef uint64_t control;
static inline control read_control(void) {
  control value;
  __asm__ volatile("mrs %0, fpcr" : "=r"(value) : : "memory");
  return value;
}
static inline void write_control(control value) {
  __asm__ volatile("msr fpcr, %0" : : "r"(value) : "memory");
}
enum { DEFAULT_CONTROL = 0 };
#else
typedef fenv_t control;
static inline control read_control(void) {
  control value;
  fegetenv(&value);
  return value;
}
static inline void write_control(control value) { fesetenv(&value); }
#endif

static inline control enter_default(void) {
  control before = read_control();
#if defined(__x86_64__) || defined(__aarch64__)
  write_control(DEFAULT_CONTROL);
#else
  fesetenv(FE_DFL_ENV);
#endif
  return before;
}

/* Whether an operation was rounded since the last call. (feclearexcept also saves and restores the
 * x87 unit, which costs more than a block of sums.) */
static inline int take_inexact(void) {
#if defined(__x86_64__)
  int inexact = (read_control() & 0x20) != 0;
  if (inexact) write_control(DEFAULT_CONTROL);
#else
  int inexact = fetestexcept(FE_INEXACT) != 0;
  if (inexact) feclearexcept(FE_INEXACT);
#endif
  return inexact;
}

enum { F64, F32, F16, BF16, TABLE };  /* the same numbers as in kernels_native.py */
enum { NOT_FINITE = 4, BLOCK = 512 }; /* likewise */

static inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline uint64_t double_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* One value of each kind as float64; every conversion is exact. */
static inline double of_f64(double x, const double *t) { (void)t; return x; }
static inline double of_f32(float x, const double *t) { (void)t; return (double)x; }
static inline double of_bf16(uint16_t x, const double *t) {
  (void)t;
  return (double)as_float((uint32_t)x << 16);
}
static inline double of_f16(uint16_t x, const double *t) {
  (void)t;
  uint32_t shifted = (uint32_t)(x & 0x7fff) << 13;
  uint32_t finite = float_bits(as_float(shifted) * 0x1p112f); /* adjusts the exponent, exactly */
  uint32_t special = shifted | 0x7f800000;
  uint32_t size = shifted >= 0x0f800000 ? special : finite;
  return (double)as_float(size | (uint32_t)(x & 0x8000) << 16);
}
static inline double of_table(uint8_t x, const double *t) { return t[x]; }

/* For each kind: start a sum or add to it, with weight 1 or another weight. Adding several inputs
 * at once, in order, saves loads and stores of the sum. */
#define LOOPS(NAME, TYPE)                                                                          \
  CLONES static void start_##NAME(double *restrict sum, const TYPE *restrict x, size_t n,          \
                                  const double *restrict t) {                                      \
    for (size_t i = 0; i < n; i++) sum[i] = of_##NAME(x[i], t);                                    \
  }                                                                                                \
  CLONES static void start_weighted_##NAME(double *restrict sum, const TYPE *restrict x, size_t n, \
                                           const double *restrict t, double w) {                   \
    for (size_t i = 0; i < n; i++) sum[i] = of_##NAME(x[i], t) * w;                                \
  }                                                                                                \
  CLONES static void add_##NAME(double *restrict sum, const TYPE *restrict x, size_t n,            \
                                const double *restrict t) {                                        \
    for (size_t i = 0; i < n; i++) sum[i] += of_##NAME(x[i], t);                                   \
  }                                                                                                \
  CLONES static void start_two_##NAME(double *restrict sum, const TYPE *restrict x,                \
                                      const TYPE *restrict y, size_t n,                            \
                                      const double *restrict t) {                                  \
    for (size_t i = 0; i < n; i++) sum[i] = of_##NAME(x[i], t) + of_##NAME(y[i], t);               \
  }                                                                                                \
  CLONES static void add_four_##NAME(double *restrict sum, const TYPE *restrict x,                 \
                                     const TYPE *restrict y, const TYPE *restrict z,               \
                                     const TYPE *restrict u, size_t n, const double *restrict t) { \
    for (size_t i = 0; i < n; i++)                                                                 \
      sum[i] = sum[i] + of_##NAME(x[i], t) + of_##NAME(y[i], t) + of_##NAME(z[i], t) +             \
               of_##NAME(u[i], t);                                                                 \
  }                                                                                                \
  CLONES static void add_weighted_##NAME(double *restrict sum, const TYPE *restrict x, size_t n,   \
                                         const double *restrict t, double w) {                     \
    for (size_t i = 0; i < n; i++) {                                                               \
      double term = of_##NAME(x[i], t) * w;                                                        \
      sum[i] += term;                                                                              \
    }                                                                                              \
  }

LOOPS(f64, double)
LOOPS(f32, float)
LOOPS(f16, uint16_t)
LOOPS(bf16, uint16_t)
LOOPS(table, uint8_t)

#define DISPATCH(NAME, TYPE)                                        \
  do {                                                              \
    const TYPE *x = raw;                                            \
    if (first && w == 1.0) start_##NAME(sum, x, n, table);          \
    else if (first) start_weighted_##NAME(sum, x, n, table, w);     \
    else if (w == 1.0) add_##NAME(sum, x, n, table);                \
    else add_weighted_##NAME(sum, x, n, table, w);                  \
  } while (0)

/* sum = x * w for the first checkpoint, sum += x * w for the others. */
static void add(double *sum, const void *raw, size_t n, int kind, const double *table, double w,
                int first) {
  switch (kind) {
    case F64: DISPATCH(f64, double); break;
    case F32: DISPATCH(f32, float); break;
    case F16: DISPATCH(f16, uint16_t); break;
    case BF16: DISPATCH(bf16, uint16_t); break;
    default: DISPATCH(table, uint8_t); break;
  }
}

void lawa_add(double *sum, const void *raw, size_t n, int kind, const double *table, double w,
              int first) {
  control before = enter_default();
  add(sum, raw, n, kind, table, w, first);
  write_control(before);
}

/* Adds the inputs first to last with weight 1, in order; starts the sum unless it was `begun`. */
static void add_range(double *sum, const void *const *raws, size_t first, size_t last,
                      size_t offset, size_t n, int kind, const double *table, int begun) {
  size_t j = first;
#define X(I) (const void *)((const char *)raws[I] + offset)
#define RANGE(NAME)                                                                           \
  do {                                                                                        \
    if (!begun && j < last) start_two_##NAME(sum, X(j), X(j + 1), n, table), j += 2;          \
    else if (!begun) start_##NAME(sum, X(j), n, table), j++;                                  \
    for (; j + 3 <= last; j += 4)                                                             \
      add_four_##NAME(sum, X(j), X(j + 1), X(j + 2), X(j + 3), n, table);                     \
    for (; j <= last; j++) add_##NAME(sum, X(j), n, table);                                   \
  } while (0)
  switch (kind) {
    case F64: RANGE(f64); break;
    case F32: RANGE(f32); break;
    case F16: RANGE(f16); break;
    case BF16: RANGE(bf16); break;
    default: RANGE(table); break;
  }
#undef RANGE
#undef X
}

CLONES static void divide(double *restrict sum, size_t n, double divisor) {
  for (size_t i = 0; i < n; i++) sum[i] /= divisor;
}

CLONES static void multiply(double *restrict sum, size_t n, double factor) {
  for (size_t i = 0; i < n; i++) sum[i] *= factor;
}

static inline uint64_t is_not_finite(double x) {
  return (double_bits(x) & 0x7fffffffffffffffu) >= 0x7ff0000000000000u;
}

CLONES static int not_finite(const double *restrict x, size_t n) {
  uint64_t found = 0;
  for (size_t i = 0; i < n; i++) found |= is_not_finite(x[i]);
  return found != 0;
}

/* Divides and rounds in one pass; returns whether a mean is not finite. */
CLONES static int divide_to_f32(float *restrict out, const double *restrict sum, size_t n,
                                double divisor, double exact_factor) {
  uint64_t found = 0;
#define ROUND(MEAN)                  \
  for (size_t i = 0; i < n; i++) {   \
    double mean = MEAN;              \
    found |= is_not_finite(mean);    \
    out[i] = (float)mean;            \
  }
  if (exact_factor != 0.0) ROUND(sum[i] * exact_factor)
  else ROUND(sum[i] / divisor)
#undef ROUND
  return found != 0;
}

/* The float32 next to x towards zero, its last bit set if anything was cut off (rounding "to odd"):
 * rounding the result to a narrower kind then equals rounding x once. */
static inline uint32_t to_odd(double x) {
  float single = (float)x;
  double wide = (double)single;
  uint32_t bits = float_bits(single);
  bits -= fabs(wide) > fabs(x);
  return bits | (wide != x);
}

/* Rounds to float32 first, which is harmless unless the result is exactly between two bfloat16
 * values. Returns whether that happened, or there was a NaN. */
CLONES static int to_bf16_by_float(uint16_t *restrict out, const double *restrict x, size_t n) {
  uint32_t odd = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = float_bits((float)x[i]);
    odd |= ((bits & 0xffff) == 0x8000) | ((bits & 0x7fffffff) > 0x7f800000);
    out[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return odd != 0;
}

/* Rounds the float64 to eight bits in integer arithmetic; its float32 is then exact. Returns
 * whether there was a value for which it is not: NaN, or too small for a normal number. */
CLONES static int to_bf16_quickly(uint16_t *restrict out, const double *restrict x, size_t n) {
  uint64_t odd = 0;
  for (size_t i = 0; i < n; i++) {
    uint64_t bits = double_bits(x[i]), size = bits & 0x7fffffffffffffffu;
    odd |= (size - 1 < 0x3810000000000000u - 1) | (size > 0x7ff0000000000000u);
    uint64_t rounded = bits + 0xfffffffffffu + (bits >> 45 & 1);
    double value;
    rounded &= ~(uint64_t)0x1fffffffffffu;
    memcpy(&value, &rounded, sizeof value);
    out[i] = (uint16_t)(float_bits((float)value) >> 16);
  }
  return odd != 0;
}

CLONES static void to_bf16(uint16_t *restrict out, const double *restrict x, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = to_odd(x[i]);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    out[i] = (uint16_t)(x[i] != x[i] ? 0x7fc0 : rounded);
  }
}

CLONES static void to_f16(uint16_t *restrict out, const double *restrict x, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = to_odd(x[i]);
    uint32_t size = bits & 0x7fffffff;
    /* Below 2^-14 the spacing is fixed: adding 0.5 makes the addition round to it. */
    uint32_t small = float_bits(as_float(size) + 0.5f) - float_bits(0.5f);
    uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t half = size < 113u << 23 ? small : normal;
    half = size >= 143u << 23 ? 0x7c00 : half;
    half = x[i] != x[i] ? 0x7e00 : half;
    out[i] = (uint16_t)(half | (bits >> 16 & 0x8000));
  }
}

/* Divide a sum (exact_factor: 1 / divisor if that is a power of two, else 0) and round it. */
static int finish(double *sum, size_t n, double divisor, double exact_factor, int kind, void *out) {
  if (kind == F32) return divide_to_f32(out, sum, n, divisor, exact_factor) ? NOT_FINITE : 0;
  if (exact_factor == 0.0) divide(sum, n, divisor);
  else if (exact_factor != 1.0) multiply(sum, n, exact_factor);
  switch (kind) {
    case F64: memcpy(out, sum, n * sizeof *sum); break;
    case F16: to_f16(out, sum, n); break;
    case BF16:
      /* Means of two or four are often exactly between two values: skip the attempt by float32. */
      if ((exact_factor != 0.0 || to_bf16_by_float(out, sum, n)) && to_bf16_quickly(out, sum, n))
        to_bf16(out, sum, n);
      break;
    default: break; /* float8 is looked up in Python */
  }
  return not_finite(sum, n) ? NOT_FINITE : 0;
}

int lawa_finish(double *sum, size_t n, double divisor, double exact_factor, int kind, void *out) {
  control before = enter_default();
  int flags = finish(sum, n, divisor, exact_factor, kind, out);
  write_control(before);
  return flags;
}

/* bfloat16 in float32 lanes. Sums of bfloat16 values of similar size are exact in float32; where
 * one was not, the processor's inexact flag is set, and the block is computed in float64 instead.
 * A 32-bit word has two values. Their sums are in two "planes", the lower halves of the words and
 * the upper ones, so nothing has to be interleaved. Vectors are those of GCC and Clang. */

enum { LANES = 8, VECTORS = 4, STEP = 2 * LANES * VECTORS, PLANE = BLOCK / 2, AHEAD = 2048 };
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef words loose __attribute__((aligned(2), may_alias)); /* in files */
typedef uint32_t pair __attribute__((aligned(2), may_alias));
typedef struct { float low[PLANE], high[PLANE]; } planes;

/* sum = before (if any) + the inputs first to last, in order; n is a multiple of STEP.
 * Mappings begin at pages, so the same value of all inputs has the same set in the L1 cache, which
 * has no room for many of them. The bytes of a later block are therefore fetched into L2. */
CLONES static void sum_planes(planes *sum, const planes *before, const void *const *raws,
                              size_t first, size_t last, size_t offset, size_t n) {
#define EACH for (int i = 0; i < VECTORS; i++)
  for (size_t at = 0; at < n / 2; at += VECTORS * LANES) {
    floats low[VECTORS], high[VECTORS];
    size_t j = first;
    if (before != NULL) {
      EACH low[i] = *(const floats *)(before->low + at + i * LANES);
      EACH high[i] = *(const floats *)(before->high + at + i * LANES);
    } else {
      const loose *x = (const loose *)((const char *)raws[j++] + offset + 4 * at);
      EACH low[i] = (floats)(x[i] << 16), high[i] = (floats)(x[i] & 0xffff0000u);
    }
    for (; j <= last; j++) {
      const loose *x = (const loose *)((const char *)raws[j] + offset + 4 * at);
      __builtin_prefetch((const char *)x + AHEAD, 0, 2);
      __builtin_prefetch((const char *)x + AHEAD + 64, 0, 2);
      EACH low[i] += (floats)(x[i] << 16), high[i] += (floats)(x[i] & 0xffff0000u);
    }
    EACH *(floats *)(sum->low + at + i * LANES) = low[i];
    EACH *(floats *)(sum->high + at + i * LANES) = high[i];
  }
#undef EACH
}

/* The bfloat16 nearest to sum / k, in the upper halves of words. The quotient may be wrong in its
 * last bits, but is in the right interval between two bfloat16 values, or at the end of the next
 * one. The middle of the interval has 9 significant bits, so its product with k (below 2^15) is
 * exact, and comparing the sum with it decides. */
static inline uint32_t nearest(uint32_t sum, float k, float reciprocal) {
  uint32_t size = sum & 0x7fffffff, down = float_bits(as_float(size) * reciprocal) & 0xffff0000;
  uint32_t middle = float_bits(as_float(down | 0x8000) * k);
  uint32_t odd = down >> 16 & 1; /* a sum at the middle goes to the even neighbour */
  return (down + (size + odd > middle ? 0x10000 : 0)) | (sum & 0x80000000);
}

/* Divides by k and rounds. Returns whether all sums were finite; otherwise `out` is invalid. */
CLONES static int round_planes(void *restrict out, const planes *restrict sum, size_t n, float k) {
  float reciprocal = 1.0f / k;
  pair *restrict pairs = out;
  uint32_t largest = 0;
  for (size_t i = 0; i < n / 2; i++) {
    uint32_t low = float_bits(sum->low[i]), high = float_bits(sum->high[i]);
    uint32_t size = low & 0x7fffffff, other = high & 0x7fffffff;
    size = size > other ? size : other;
    largest = largest > size ? largest : size;
    pairs[i] = nearest(low, k, reciprocal) >> 16 | nearest(high, k, reciprocal);
  }
  return largest < 0x7f800000;
}

/* Whether means of this kind can be computed in planes. */
static int fits_planes(int kind, int target, size_t k) {
  return kind == BF16 && target == BF16 && k < 1 << 15;
}

/* The mean of the inputs first to last in planes; 0 if that is not exact. */
static int mean_planes(const void *const *raws, size_t first, size_t last, size_t offset, size_t n,
                       void *out) {
  _Alignas(64) planes sum;
  take_inexact();
  sum_planes(&sum, NULL, raws, first, last, offset, n);
  return !take_inexact() && round_planes(out, &sum, n, (float)(last - first + 1));
}

/* The mean of k inputs in memory, in blocks whose sums stay in the L1 cache. */
int lawa_mean(const void *const *raws, const double *weights, size_t k, size_t n, int kind,
              size_t width, const double *table, double divisor, double exact_factor, int target,
              size_t target_width, void *out) {
  double sum[BLOCK];
  int flags = 0, uniform = 1;
  control before = enter_default();
  for (size_t j = 0; j < k; j++) uniform &= weights[j] == 1.0;
  int quick = uniform && fits_planes(kind, target, k) && divisor == (double)k;
  for (size_t start = 0, count; start < n; start += count) {
    size_t offset = start * width;
    void *made = (char *)out + start * target_width;
    count = n - start < BLOCK ? n - start : BLOCK;
    if (quick && count >= STEP) {
      count -= count % STEP;
      if (mean_planes(raws, 0, k - 1, offset, count, made)) continue;
    }
    if (uniform) add_range(sum, raws, 0, k - 1, offset, count, kind, table, 0);
    for (size_t j = 0; !uniform && j < k; j++)
      add(sum, (const char *)raws[j] + offset, count, kind, table, weights[j], j == 0);
    flags |= finish(sum, count, divisor, exact_factor, target, made);
  }
  write_control(before);
  return flags;
}

CLONES static void difference(double *restrict out, const double *restrict a,
                              const double *restrict b, size_t n) {
  for (size_t i = 0; i < n; i++) out[i] = a[i] - b[i];
}

CLONES static int has_zero(const double *restrict x, size_t n) {
  uint64_t found = 0;
  for (size_t i = 0; i < n; i++) found |= x[i] == 0.0;
  return found != 0;
}

/* The prefix sums of a block; those of inputs with a slot are stored in its row. Returns whether
 * all additions were exact and all values finite (otherwise the last sum is not): then neither sums
 * nor exact differences depend on the order of summation, except for the sign of a zero. */
static int prefix_sums(double *rows, const int64_t *slots, const void *const *raws, size_t num,
                       size_t offset, size_t count, int kind, const double *table) {
  double sum[BLOCK];
  take_inexact();
  size_t first = 0;
  for (size_t i = 0; i < num; i++) {
    if (slots[i] < 0) continue;
    add_range(sum, raws, first, i, offset, count, kind, table, first > 0);
    memcpy(rows + slots[i] * BLOCK, sum, count * sizeof *sum);
    first = i + 1;
  }
  return first && !take_inexact() && !not_finite(sum, count);
}

/* The same in planes, up to the last slot. */
static int prefix_planes(planes *rows, const int64_t *slots, const void *const *raws, size_t num,
                         size_t offset, size_t n) {
  const planes *before = NULL;
  take_inexact();
  for (size_t i = 0, first = 0; i < num; i++) {
    if (slots[i] < 0) continue;
    sum_planes(rows + slots[i], before, raws, first, i, offset, n);
    before = rows + slots[i];
    first = i + 1;
  }
  return !take_inexact();
}

/* sum = a - b; returns whether it is nowhere zero. */
CLONES static int subtract_planes(planes *restrict sum, const planes *restrict a,
                                  const planes *restrict b, size_t n) {
  uint32_t zero = 0;
  for (size_t i = 0; i < n / 2; i++) {
    sum->low[i] = a->low[i] - b->low[i];
    sum->high[i] = a->high[i] - b->high[i];
    zero |= sum->low[i] == 0.0f ? 1 : 0;
    zero |= sum->high[i] == 0.0f ? 1 : 0;
  }
  return !zero;
}

/* The mean of a window, from prefix sums that are exact; 0 if it is not. */
static int window_planes(const planes *rows, const int64_t *slots, size_t first, size_t last,
                         size_t n, void *out) {
  const planes *sum = rows + slots[last];
  _Alignas(64) planes difference;
  if (first) {
    take_inexact();
    int nonzero = subtract_planes(&difference, sum, rows + slots[first - 1], n);
    if (take_inexact() || !nonzero) return 0;
    sum = &difference;
  }
  return round_planes(out, sum, n, (float)(last - first + 1));
}

/* Means of many windows over the same inputs. Window w has inputs firsts[w] to lasts[w]; its
 * weights begin at weights + places[w], or are all 1 if places[w] is negative. slots has the row of
 * each input whose prefix sum is needed, or -1; rows is scratch memory for them, BLOCK values each,
 * and eight values more. flags has one word per window. */
void lawa_windows(const void *const *raws, size_t num, size_t n, int kind, size_t width,
                  const double *table, size_t num_windows, const int64_t *firsts,
                  const int64_t *lasts, const int64_t *places, const double *weights,
                  const double *divisors, const double *exact_factors, const int64_t *slots,
                  int target, size_t target_width, void *const *outs, double *rows, int *flags) {
  double sum[BLOCK];
  planes *lanes = (planes *)(((uintptr_t)rows + 63) & ~(uintptr_t)63);
  control before = enter_default();
  for (size_t start = 0, count; start < n; start += count) {
    size_t offset = start * width;
    count = n - start < BLOCK ? n - start : BLOCK;
    int quick = fits_planes(kind, target, num) && count >= STEP;
    if (quick) count -= count % STEP;
    int clean = quick ? prefix_planes(lanes, slots, raws, num, offset, count)
                      : prefix_sums(rows, slots, raws, num, offset, count, kind, table);
    for (size_t w = 0; w < num_windows; w++) {
      size_t first = (size_t)firsts[w], last = (size_t)lasts[w];
      void *made = (char *)outs[w] + start * target_width;
      int done = 0;
      if (places[w] < 0 && quick && divisors[w] == (double)(last - first + 1)) {
        if (clean && window_planes(lanes, slots, first, last, count, made)) continue;
        if (mean_planes(raws, first, last, offset, count, made)) continue;
      } else if (places[w] < 0 && clean && !quick) {
        const double *end = rows + slots[last] * BLOCK;
        take_inexact();
        if (first) difference(sum, end, rows + slots[first - 1] * BLOCK, count);
        else memcpy(sum, end, count * sizeof *sum);
        done = !take_inexact() && !has_zero(sum, count);
      }
      for (size_t i = first, begun = 0; !done && i <= last; i++) {
        double weight = places[w] < 0 ? 1.0 : weights[places[w] + (int64_t)(i - first)];
        if (weight == 0.0) continue;
        add(sum, (const char *)raws[i] + offset, count, kind, table, weight, !begun);
        begun = 1;
      }
      flags[w] |= finish(sum, count, divisors[w], exact_factors[w], target, made);
    }
  }
  write_control(before);
}

/* Guarded mappings. Reading a page of a mapped file that has been truncated meanwhile, or cannot be
 * read from its disk, raises SIGBUS, which ends the process. For the mappings made here a handler
 * puts zeros in the place of such pages and marks the mapping as damaged; the reader goes on, and
 * Python refuses the result. SIGBUS from anywhere else goes to the handler that was there before. */

enum { MAPPINGS = 1 << 16 };
static struct {
  _Atomic uintptr_t begin, end; /* begin is 0 for a free slot */
  atomic_int damaged;
} mappings[MAPPINGS];
static atomic_int num_mappings; /* one past the last slot that was ever used */
static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous_action;
static atomic_int passed_on;

static void replace_pages(int number, siginfo_t *info, void *context) {
  (void)context;
  uintptr_t at = (uintptr_t)info->si_addr;
  uintptr_t page = at & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
  for (int i = 0; info->si_code > 0 && i < num_mappings; i++) {
    uintptr_t begin = mappings[i].begin, end = mappings[i].end;
    if (begin == 0 || at < begin || at >= end) continue;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap((void *)page, end - page, PROT_READ, flags, -1, 0) == MAP_FAILED) break;
    mappings[i].damaged = 1;
    return;
  }
  /* Not ours. The faulting instruction runs again, now under the handler of before. */
  if (passed_on++) signal(number, SIG_DFL);
  else sigaction(number, &previous_action, NULL);
  if (info->si_code <= 0) raise(number); /* sent by a process */
}

/* Map `size` bytes of an open file for reading. Returns a slot, or -1. */
int lawa_map(int file, size_t size, void **address) {
  int slot = 0;
  pthread_mutex_lock(&mapping_lock);
  while (slot < MAPPINGS && mappings[slot].begin) slot++;
  void *found = slot < MAPPINGS ? mmap(NULL, size, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
  struct sigaction action = {0}, current;
  if (found != MAP_FAILED && sigaction(SIGBUS, NULL, &current) == 0) {
    if (!(current.sa_flags & SA_SIGINFO) || current.sa_sigaction != replace_pages) {
      action.sa_sigaction = replace_pages;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      previous_action = current;
      passed_on = 0;
      sigaction(SIGBUS, &action, NULL);
    }
    mappings[slot].damaged = 0;
    mappings[slot].end = (uintptr_t)found + size;
    mappings[slot].begin = (uintptr_t)found;
    if (slot >= num_mappings) num_mappings = slot + 1;
    *address = found;
  } else {
    slot = -1;
  }
  pthread_mutex_unlock(&mapping_lock);
  return slot;
}

/* Whether pages of a mapping were replaced by zeros. */
int lawa_damaged(int slot) { return mappings[slot].damaged; }

void lawa_unmap(int slot) {
  pthread_mutex_lock(&mapping_lock);
  uintptr_t begin = mappings[slot].begin, end = mappings[slot].end;
  mappings[slot].begin = 0;
  munmap((void *)begin, end - begin);
  pthread_mutex_unlock(&mapping_lock);
}
