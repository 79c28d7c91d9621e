// Words of memory that two processes share: what was written before a word was stored is seen by who has loaded it.
// Plain stores come in another order on processors with a weak one, such as Grace.

#include <cstdint>

extern "C" {

void hookstats_store_release(int64_t* word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

int64_t hookstats_load_acquire(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
}
