// The memory that the parts of tensors meet in, the order in which streams come, and what CUDA is asked about streams
// and devices. Host code.
//
// Scratch is never shared by what may run at the same time: each stream has a piece of it, and so has each capture into
// a CUDA graph, for each of its streams; the next capture takes the piece of a graph that is no more. All streams but
// the first few have one piece together, in which their launches come behind each other. Each launch leaves the
// counters at zero (fold.h), and CUDA runs one replay of a graph behind the other, on whichever streams.
//
// Memory comes from CUDA itself, not from torch: in a hook, torch's operators may be watched by a Python mode, and its
// allocator may give out the memory of one CUDA graph. It is made while no lock is held, as that may wait for work that
// waits for a thread that wants the lock, and is never freed.

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "fold.h"

namespace hookstats::cuda {
namespace {

constexpr size_t kMostRemembered = 1 << 16;  // sites
constexpr int kStreams = 8;                  // of a device, with a piece of their own

struct Piece {
  double* partials = nullptr;
  unsigned* counters = nullptr;
  int64_t doubles = 0, count = 0;

  bool fits(int64_t partials_wanted, int64_t counters_wanted) const {
    return partials && doubles >= partials_wanted && count >= counters_wanted;
  }
  int64_t bytes() const { return doubles * int64_t(sizeof *partials) + count * int64_t(sizeof *counters); }
};

// Of a piece, by a stream or by a capture on it.
struct Use {
  Piece piece;
  bool shares = false;                         // the device's shared piece; it has none of its own
  bool stays = true;                           // as in Stream
  bool was_used = false;                       // since the last closing
  unsigned long long closings = 0;             // that it comes behind
  cudaEvent_t event = nullptr;                 // of a stream
  std::shared_ptr<std::atomic<bool>> is_gone;  // of a capture: whether its graph is; null: nobody tells
};
using StreamAndCapture = std::pair<void*, unsigned long long>;

struct LastLaunch {
  void* stream = nullptr;
  unsigned long long begun = ~0ull;  // the closings that had begun before
};

struct Device {
  std::mutex mutex;
  unsigned long long* clock = nullptr;
  std::map<StreamAndCapture, Use> uses;
  std::unordered_map<const void*, LastLaunch> last;  // by site; those of sites that are no more stay
  unsigned long long closings = 0, begun = 0;
  void* closer = nullptr;  // the stream of the last one
  cudaEvent_t closed = nullptr;
  int streams = 0;    // that have launched
  int64_t bytes = 0;  // of all pieces
  Piece shared;       // of those that have none of their own
  std::mutex sharing;
  std::optional<void*> sharer;  // the last one of them that has launched

  Piece& piece_of(Use& use) { return use.shares ? shared : use.piece; }
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

// Zeros on the current device, seen by every stream. Waits for no other work.
void* make(size_t bytes) {
  const WhileCapturing mode;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes),
        ("expected " + std::to_string(bytes) + " bytes of device memory for scratch: ").c_str());
  cudaStream_t own = nullptr;
  check(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
  const cudaError_t cleared = cudaMemsetAsync(memory, 0, bytes, own), done = cudaStreamSynchronize(own);
  (void)cudaStreamDestroy(own);
  check(cleared != cudaSuccess ? cleared : done);
  return memory;
}

Piece make_piece(int64_t doubles, int64_t count) {
  const auto bytes = size_t(doubles) * sizeof(double);
  void* memory = make(bytes + size_t(count) * sizeof(unsigned));
  return {static_cast<double*>(memory), reinterpret_cast<unsigned*>(static_cast<char*>(memory) + bytes), doubles,
          count};
}

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
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
  if (failed(capture_of(stream, number, &graph)) || number == 0) return nullptr;
  auto flag = std::make_shared<std::atomic<bool>>(false);
  auto* held = new Flag(flag);
  const auto tell = [](void* held) {  // on a thread of CUDA's, which may call nothing of it
    auto* flag = static_cast<Flag*>(held);
    **flag = true;
    delete flag;
  };
  cudaUserObject_t object = nullptr;
  if (failed(cudaUserObjectCreate(&object, held, tell, 1, cudaUserObjectNoDestructorSync))) {
    delete held;
    return nullptr;
  }
  if (!failed(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove))) return flag;
  (void)failed(cudaUserObjectRelease(object, 1));
  return nullptr;
}

// Takes the piece of a graph that is no more; an empty one where there is none that is large enough.
Piece take_from_graphs(Device& device, int64_t doubles, int64_t count) {
  for (auto each = device.uses.begin(); each != device.uses.end(); ++each) {
    const Use& use = each->second;
    if (!use.is_gone || !*use.is_gone || !use.piece.fits(doubles, count)) continue;
    const Piece piece = use.piece;
    device.uses.erase(each);
    return piece;
  }
  return {};
}

// Puts what follows on a stream behind what was launched on another one, of which this is the use.
void follow(void* stream, void* other, const Use& use) {
  if (use.stays) {
    if (capture_on(other)) return;  // before a capture, what came before was waited for
    check(cudaEventRecord(use.event, static_cast<cudaStream_t>(other)));
  }
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), use.event, 0));
}

// The same behind the last closing, and so behind all of them.
void follow_closing(const Device& device, const Stream& stream) {
  if (device.closings == 0 || device.closer == stream.handle) return;
  check(cudaSetDevice(stream.device));
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), device.closed, 0));
}

// What comes behind this closing from now on, comes behind all that is on its stream so far.
void record_closing(Device& device, const Stream& stream) {
  check(cudaSetDevice(stream.device));
  if (!device.closed) device.closed = make_event();
  device.closer = stream.handle;
  ++device.closings;
  check(cudaEventRecord(device.closed, static_cast<cudaStream_t>(stream.handle)));
}

// Gives scratch of this size to a stream, or to a capture on it.
void give_scratch(Device& device, const Stream& stream, const StreamAndCapture& key, int64_t doubles, int64_t count) {
  Use use;
  Piece piece;
  unsigned long long* clock = nullptr;
  bool is_there = false;
  {
    const std::lock_guard<std::mutex> lock(device.mutex);
    const auto found = device.uses.find(key);
    use.shares = found != device.uses.end() ? found->second.shares : !key.second && device.streams >= kStreams;
    is_there = use.shares && device.shared.fits(doubles, count);
    if (!is_there) piece = take_from_graphs(device, doubles, count);
    is_there = is_there || piece.partials;
    clock = device.clock;
  }
  check(cudaSetDevice(stream.device));
  if (!clock) clock = static_cast<unsigned long long*>(make(sizeof *clock));
  if (!is_there) piece = make_piece(std::max(doubles, kScratchDoubles), std::max(count, kScratchCounters));
  use.stays = stream.stays;
  key.second ? void(use.is_gone = end_of_capture(stream.handle)) : void(use.event = make_event());
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (!device.clock) device.clock = clock;  // else another thread was faster
  const auto [there, is_new] = device.uses.try_emplace(key, std::move(use));
  device.streams += is_new && !key.second;
  if (!is_there) device.bytes += piece.bytes();
  Piece& before = device.piece_of(there->second);
  if (!before.fits(doubles, count)) before = piece;  // launches may still use the one that was too small
}

}  // namespace

unsigned long long capture_on(void* stream) {
  unsigned long long number = 0;
  if (!stream) return 0;  // the default stream cannot be captured
  (void)failed(capture_of(stream, number, nullptr));
  return number;
}

Versions versions_of(int device) {
  Versions versions;
  const auto runtime = cudaRuntimeGetVersion(&versions.runtime), driver = cudaDriverGetVersion(&versions.driver);
  if (versions.driver) check(runtime != cudaSuccess ? runtime : driver);  // else it is too old for this runtime
  versions.capability = facts_of(device).capability;
  return versions;
}

Launch launch_on(const Stream& stream, const int32_t* active, int64_t doubles, int64_t counters) {
  Device& device = device_of(stream.device);
  const unsigned long long capture = capture_on(stream.handle);
  const StreamAndCapture key{stream.handle, capture};
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(device.mutex);
      const auto found = device.uses.find(key);
      if (found != device.uses.end() && device.piece_of(found->second).fits(doubles, counters)) {
        Use& use = found->second;
        const Piece& piece = device.piece_of(use);
        if (!capture && use.closings != device.closings) {
          follow_closing(device, stream);
          use.closings = device.closings;
        }
        use.was_used = true;
        return {stream.handle, stream.device, piece.partials, piece.counters,
                device.clock,  active,        capture,        use.stays || capture ? nullptr : use.event};
      }
    }
    give_scratch(device, stream, key, doubles, counters);
  }
}

InTurn::InTurn(const Launch& launch, const void* const* sites, size_t count) {
  static std::mutex mutexes[64];
  if (launch.capture || count == 0) return;
  lock_ = std::unique_lock<std::mutex>(mutexes[reinterpret_cast<uintptr_t>(sites[0]) / sizeof(int64_t) % 64]);
  Device& device = device_of(launch.device);
  std::set<void*> others;
  std::unique_lock<std::mutex> lock(device.mutex);
  if (device.uses.at({launch.stream, 0}).shares) {
    lock.unlock();
    sharing_ = std::unique_lock<std::mutex>(device.sharing);
    lock.lock();
    others.insert(device.sharer.value_or(launch.stream));
    device.sharer = launch.stream;
  }
  for (size_t i = 0; i < count; ++i) {
    LastLaunch& last = device.last[sites[i]];
    if (last.begun == device.begun) others.insert(last.stream);
    last = {launch.stream, device.begun};
  }
  others.erase(launch.stream);
  for (void* other : others) follow(launch.stream, other, device.uses.at({other, 0}));
}

int64_t scratch_bytes(int number) {
  Device& device = device_of(number);
  const std::lock_guard<std::mutex> lock(device.mutex);
  return device.bytes;
}

// It is recorded at once, too: who comes behind it later is behind what it waits for, though it should never end.
void begin_closing(const Stream& stream) {
  if (capture_on(stream.handle)) return;
  Device& device = device_of(stream.device);
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (device.uses.empty()) return;  // nothing was launched
  check(cudaSetDevice(stream.device));
  follow_closing(device, stream);
  for (auto& [key, use] : device.uses) {
    const auto& [handle, capture] = key;
    if (capture || !std::exchange(use.was_used, false) || handle == stream.handle) continue;
    follow(stream.handle, handle, use);
  }
  ++device.begun;
  if (device.last.size() > kMostRemembered) device.last.clear();
  record_closing(device, stream);
}

void end_closing(const Stream& stream) {
  if (capture_on(stream.handle)) return;
  Device& device = device_of(stream.device);
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (!device.uses.empty()) record_closing(device, stream);
}

void load_kernels(int device) {
  check(cudaSetDevice(device));
  cudaFuncAttributes of{};
  for (const void* kernel : kernels()) check(cudaFuncGetAttributes(&of, kernel));
}

}  // namespace hookstats::cuda
