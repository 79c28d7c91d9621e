// The memory that the parts of tensors meet in, the order in which streams come, and what CUDA is asked about streams
// and devices. Host code, but for one small kernel.
//
// Scratch is never shared by what may run at the same time: each stream has a piece of it, and so has each capture into
// a CUDA graph, for each of its streams. A piece whose graph is no more is given to the next capture.
//
// Its counters are zero between launches (fold.h). Should one not be, because memory was written over or the same graph
// was replayed twice at once, whatever is launched later would fold too early, forever. So they are looked at again: in
// a stream before its first launch after a step was closed, in a graph at the beginning of each replay.
//
// Memory comes from CUDA itself, not from torch: in a hook, torch's operators may be watched by a Python mode, and its
// allocator may give out the memory of one CUDA graph. It is made while no lock is held, and never freed.

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "fold.h"

namespace hookstats::cuda {
namespace {

constexpr size_t kSpare = 6;  // pieces of 3.8 MB that are made ahead

// Makes counters zero that are not. `told` is in the host's memory.
__global__ void __launch_bounds__(kThreads) mend_kernel(unsigned* counters, int64_t count, unsigned* told) {
  HOOKSTATS_SHARED(unsigned, found, 1);
  if (threadIdx.x == 0) found[0] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    if (counters[i] == 0) continue;
    counters[i] = 0;
    atomicAdd(&found[0], 1u);
  }
  __syncthreads();
  if (threadIdx.x == 0 && found[0] != 0) *static_cast<volatile unsigned*>(told) = *told + found[0];
}

struct Piece {
  double* partials = nullptr;
  unsigned* counters = nullptr;
  int64_t doubles = 0, count = 0;

  bool fits(int64_t partials_wanted, int64_t counters_wanted) const {
    return doubles >= partials_wanted && count >= counters_wanted;
  }
};

// Of a piece, by a stream or by a capture on it.
struct Use {
  Piece piece;
  bool stays = true;                // as in Stream
  bool was_used = false;            // since the last closing
  unsigned long long closings = 0;  // that it comes behind
  bool is_looked_at = false;        // its scratch, since then
  cudaEvent_t event = nullptr;
  std::shared_ptr<std::atomic<bool>> is_gone;  // of a capture: whether its graph is; null: nobody tells
};

struct Device {
  std::mutex mutex;
  unsigned long long* clock = nullptr;
  unsigned* told = nullptr;  // how many counters were mended; in the host's memory
  std::vector<Piece> spare;
  std::map<std::pair<void*, unsigned long long>, Use> uses;  // by stream and capture
  unsigned long long closings = 0;
  void* closer = nullptr;  // the stream of the last one
  cudaEvent_t closed = nullptr;
};

std::mutex devices_mutex;
auto* const devices = new std::map<int, Device>;  // never destroyed: the device may be gone before

Device& device_of(int number) {
  const std::lock_guard<std::mutex> lock(devices_mutex);
  return (*devices)[number];
}

// While it lives, memory can be made although this thread, or another one, captures a CUDA graph.
class WhileCapturing {
 public:
  WhileCapturing() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  WhileCapturing(const WhileCapturing&) = delete;
  WhileCapturing& operator=(const WhileCapturing&) = delete;
  ~WhileCapturing() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

const char* no_room(size_t bytes, cudaError_t error) {
  thread_local std::string text;
  text = "expected " + std::to_string(bytes) + " bytes of device memory for scratch: " + message(error);
  return text.c_str();
}

// Zeros on the current device, seen by every stream. Waits for no other work.
const char* make(void** memory, size_t bytes) {
  const WhileCapturing mode;
  if (const auto error = cudaMalloc(memory, bytes)) return no_room(bytes, error);
  cudaStream_t own = nullptr;
  if (const auto error = cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking)) return message(error);
  const cudaError_t cleared = cudaMemsetAsync(*memory, 0, bytes, own), done = cudaStreamSynchronize(own);
  (void)cudaStreamDestroy(own);
  return message(cleared != cudaSuccess ? cleared : done);
}

const char* make_piece(Piece& piece, int64_t doubles, int64_t count) {
  void* memory = nullptr;
  const auto bytes = size_t(doubles) * sizeof(double);
  if (const char* problem = make(&memory, bytes + size_t(count) * sizeof(unsigned))) return problem;
  piece = {static_cast<double*>(memory), reinterpret_cast<unsigned*>(static_cast<char*>(memory) + bytes), doubles,
           count};
  return nullptr;
}

// What a device has one of.
const char* make_common(Device& device) {
  {
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.clock) return nullptr;
  }
  void *clock = nullptr, *told = nullptr;
  cudaEvent_t closed = nullptr;
  if (const char* problem = make(&clock, sizeof(unsigned long long))) return problem;
  {
    const WhileCapturing mode;
    if (const auto error = cudaHostAlloc(&told, sizeof(unsigned), cudaHostAllocMapped)) return message(error);
    if (const auto error = cudaEventCreateWithFlags(&closed, cudaEventDisableTiming)) return message(error);
  }
  *static_cast<unsigned*>(told) = 0;
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (device.clock) return nullptr;  // another thread was faster
  device.clock = static_cast<unsigned long long*>(clock);
  device.told = static_cast<unsigned*>(told);
  device.closed = closed;
  return nullptr;
}

cudaError_t capture_of(void* stream, unsigned long long& number, cudaGraph_t* graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  number = 0;
#if defined(CUDART_VERSION) && CUDART_VERSION < 13000
  const auto error = cudaStreamGetCaptureInfo_v2(static_cast<cudaStream_t>(stream), &status, &number, graph);
#else
  const auto error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &number, graph);
#endif
  number = error == cudaSuccess && status != cudaStreamCaptureStatusNone ? number + 1 : 0;
  return error;
}

// Of the graph that a stream is captured into: whether it is no more, and nothing of it still runs. Null: nobody tells.
std::shared_ptr<std::atomic<bool>> end_of_capture(void* stream) {
  using Flag = std::shared_ptr<std::atomic<bool>>;
  cudaGraph_t graph = nullptr;
  unsigned long long number = 0;
  if (message(capture_of(stream, number, &graph)) || number == 0) return nullptr;
  auto flag = std::make_shared<std::atomic<bool>>(false);
  auto* held = new Flag(flag);
  const auto tell = [](void* held) {  // on a thread of CUDA's, which may call nothing of it
    auto* flag = static_cast<Flag*>(held);
    **flag = true;
    delete flag;
  };
  cudaUserObject_t object = nullptr;
  if (message(cudaUserObjectCreate(&object, held, tell, 1, cudaUserObjectNoDestructorSync))) {
    delete held;
    return nullptr;
  }
  if (!message(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove))) return flag;
  (void)message(cudaUserObjectRelease(object, 1));
  return nullptr;
}

// The piece of a graph that is no more, or a spare one, which becomes that of this use. False: there is none.
bool take_piece(Device& device, Use& use, int64_t doubles, int64_t count) {
  for (auto each = device.uses.begin(); each != device.uses.end();) {
    if (each->second.is_gone && *each->second.is_gone) {
      device.spare.push_back(each->second.piece);
      if (each->second.event) (void)cudaEventDestroy(each->second.event);
      each = device.uses.erase(each);
    } else {
      ++each;
    }
  }
  for (size_t i = device.spare.size(); i-- > 0;) {
    if (!device.spare[i].fits(doubles, count)) continue;
    use.piece = device.spare[i];
    device.spare.erase(device.spare.begin() + i);
    return true;
  }
  return false;
}

// Before a launch: behind the last closing, and on scratch that has been looked at.
const char* begin(Device& device, Use& use, void* stream, bool is_captured, bool is_scratch_used) {
  if (!is_captured && use.closings != device.closings) {
    if (device.closer != stream) {
      const auto error = cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), device.closed, 0);
      if (error != cudaSuccess) return message(error);
    }
    use.closings = device.closings;
    use.is_looked_at = false;
  }
  if (use.is_looked_at || !is_scratch_used) return nullptr;
  use.is_looked_at = true;
  return message(launch(mend_kernel, dim3(1), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), use.piece.counters,
                        use.piece.count, device.told));
}

}  // namespace

unsigned long long capture_on(void* stream) {
  unsigned long long number = 0;
  if (!stream) return 0;  // the default stream cannot be captured
  (void)message(capture_of(stream, number, nullptr));
  return number;
}

const char* ask(Versions& versions, int device) {
  for (const cudaError_t error : {cudaRuntimeGetVersion(&versions.runtime), cudaDriverGetVersion(&versions.driver)}) {
    if (const char* problem = message(error)) return problem;
  }
  versions.capability = facts_of(device).capability;
  return nullptr;
}

const char* launch_on(Launch& launch, const Stream& stream, const int32_t* active, int64_t doubles, int64_t counters) {
  Device& device = device_of(stream.device);
  const unsigned long long capture = capture_on(stream.handle);
  Piece made;
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(device.mutex);
      const auto found = device.uses.find({stream.handle, capture});
      const bool is_known = found != device.uses.end();
      if (is_known && found->second.piece.fits(doubles, counters)) {
        Use& use = found->second;
        if ((!capture && use.closings != device.closings) || (!use.is_looked_at && counters > 0)) {
          if (const auto error = cudaSetDevice(stream.device)) return message(error);
          if (const char* problem = begin(device, use, stream.handle, capture != 0, counters > 0)) return problem;
        }
        use.was_used = true;
        if (made.partials) device.spare.push_back(made);  // another thread was faster
        launch = {stream.handle,
                  stream.device,
                  use.piece.partials,
                  use.piece.counters,
                  device.clock,
                  active,
                  capture,
                  use.stays || capture ? nullptr : use.event};
        return nullptr;
      }
      Use use;
      if (device.clock && (made.partials || take_piece(device, use, doubles, counters))) {
        if (made.partials) use.piece = std::exchange(made, {});
        if (is_known) {  // its piece was too small: launches may still use it
          found->second.piece = use.piece;
          found->second.is_looked_at = false;
          continue;
        }
        use.stays = stream.stays;
        if (capture) {
          use.is_gone = end_of_capture(stream.handle);
        } else {
          cudaError_t error = cudaSetDevice(stream.device);
          if (error == cudaSuccess) error = cudaEventCreateWithFlags(&use.event, cudaEventDisableTiming);
          if (error != cudaSuccess) {
            device.spare.push_back(use.piece);
            return message(error);
          }
        }
        device.uses[{stream.handle, capture}] = std::move(use);
        continue;
      }
    }
    if (const auto error = cudaSetDevice(stream.device)) return message(error);
    if (const char* problem = make_common(device)) return problem;
    const int64_t most_doubles = std::max(doubles, kScratchDoubles), most = std::max(counters, kScratchCounters);
    if (const char* problem = make_piece(made, most_doubles, most)) return problem;
  }
}

const char* reserve(int number) {
  if (const auto error = cudaSetDevice(number)) return message(error);
  Device& device = device_of(number);
  if (const char* problem = make_common(device)) return problem;
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(device.mutex);
      if (device.spare.size() >= kSpare) return nullptr;
    }
    Piece piece;
    if (const char* problem = make_piece(piece, kScratchDoubles, kScratchCounters)) return problem;
    const std::lock_guard<std::mutex> lock(device.mutex);
    device.spare.push_back(piece);
  }
}

const char* begin_closing(const Stream& stream) {
  if (capture_on(stream.handle)) return nullptr;
  Device& device = device_of(stream.device);
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (const auto error = cudaSetDevice(stream.device)) return message(error);
  for (auto& [key, use] : device.uses) {
    const auto& [handle, capture] = key;
    if (capture || !std::exchange(use.was_used, false) || handle == stream.handle) continue;
    if (use.stays) {
      if (capture_on(handle)) continue;  // before a capture, what came before was waited for
      if (const auto error = cudaEventRecord(use.event, static_cast<cudaStream_t>(handle))) return message(error);
    }
    const auto error = cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), use.event, 0);
    if (error != cudaSuccess) return message(error);
  }
  return nullptr;
}

const char* end_closing(const Stream& stream) {
  if (capture_on(stream.handle)) return nullptr;
  Device& device = device_of(stream.device);
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (!device.closed) return nullptr;  // nothing was launched
  if (const auto error = cudaSetDevice(stream.device)) return message(error);
  device.closer = stream.handle;
  ++device.closings;
  return message(cudaEventRecord(device.closed, static_cast<cudaStream_t>(stream.handle)));
}

int64_t mended() {
  const std::lock_guard<std::mutex> lock(devices_mutex);
  int64_t all = 0;
  for (auto& [number, device] : *devices) {
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.told) all += *static_cast<volatile unsigned*>(device.told);
  }
  return all;
}

const char* load(Dtype dtype, HistogramKind kind, int device) {
  constexpr int kLoadsInCaptures = 12030;  // a driver from CUDA 12.3 on
  Versions versions;
  if (const char* problem = ask(versions, device)) return problem;
  if (versions.driver >= kLoadsInCaptures) return nullptr;
  if (const auto error = cudaSetDevice(device)) return message(error);
  for (const char* problem : {load_accumulate(dtype, kind, device), load_many(dtype, kind, device), load_blocks(dtype),
                              load_softmax(dtype), load_merge(), load_checksum(), load_sample()}) {
    if (problem) return problem;
  }
  return message(load_kernel(mend_kernel));
}

}  // namespace hookstats::cuda
