// Computes torch's CUDA operations on the CPU, in place: the stub's device memory is the host's.
//
// Each operation that torch registers for CUDA is given a kernel that waits for the current stream, as under
// CUDA_LAUNCH_BLOCKING=1, calls the CPU's kernel on the same bytes, and copies what that returns. What launches no
// kernel (views, allocation, copies of whole tensors) stays torch's own.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <vector>

extern "C" int cuda_stub_computes(int device);
extern "C" void cuda_stub_asserts(void);

namespace {

using c10::IValue;
using torch::jit::Stack;

struct Pair {
  at::Tensor device, host;
};

at::Tensor empty_like(const at::Tensor& tensor, c10::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

at::Tensor same_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return empty_like(tensor, c10::kCPU);
  auto alias = at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

size_t bytes_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * tensor.element_size();
}

void wait_and_count(c10::Device device) {
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  C10_CUDA_CHECK(static_cast<cudaError_t>(cuda_stub_computes(device.index())));
}

class Call {
 public:
  void take(IValue& value) {
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) all.push_back(host(each));
      value = c10::List<at::Tensor>(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (std::optional<at::Tensor> each : value.toOptionalTensorVector()) all.push_back(each ? std::make_optional(host(*each)) : each);
      value = all;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator = value.toGenerator();
      value = IValue();
    }
  }

  void give(IValue& value) {
    if (value.isTensor()) {
      value = on_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) all.push_back(on_device(each));
      value = c10::List<at::Tensor>(all);
    }
  }

  // What an `out=` was resized to lies elsewhere.
  void resize() {
    for (auto& [tensor, alias] : pairs) {
      if (alias.sizes() == tensor.sizes()) continue;
      tensor.resize_(alias.sizes());
      at::Tensor target = same_bytes(tensor);
      at::native::copy_(target, alias, false);
    }
  }

  std::optional<c10::Device> device;
  std::optional<at::Generator> generator;

 private:
  at::Tensor host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& pair : pairs)
      if (pair.device.is_same(tensor)) return pair.host;
    device = tensor.device();
    pairs.push_back({tensor, same_bytes(tensor)});
    return pairs.back().host;
  }

  at::Tensor on_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& pair : pairs)
      if (pair.host.is_same(tensor)) return pair.device;
    auto copy = empty_like(tensor, *device);
    if (tensor.numel()) std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), bytes_of(tensor));
    return copy;
  }

  std::vector<Pair> pairs;
};

// Numbers that the CPU's generator draws as the GPU's would be: by its seed and offset, which go on.
class Drawing {
 public:
  explicit Drawing(const Call& call) : cpu(at::globalContext().defaultGenerator(c10::kCPU)), locked(cpu.mutex()), before(cpu.get_state()) {
    at::Generator gpu = call.generator ? *call.generator : at::globalContext().defaultGenerator(*call.device);
    uint64_t offset = gpu.get_offset();
    cpu.set_current_seed(gpu.current_seed() + 0x9e3779b97f4a7c15ull * (offset / 4));
    gpu.set_offset(offset + 4);
    locked.unlock();
  }
  ~Drawing() {
    locked.lock();
    cpu.set_state(before);
  }

 private:
  at::Generator cpu;
  std::unique_lock<std::mutex> locked;
  at::Tensor before;
};

void compute(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  Call call;
  for (size_t i = 0; i < arguments.size(); i++) call.take((*stack)[stack->size() - arguments.size() + i]);
  if (!call.device) call.device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  c10::cuda::CUDAGuard guard(*call.device);
  wait_and_count(*call.device);
  {
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(call);
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } catch (const c10::IndexError& error) {
      // A GPU's kernel looks at indices on the device, and asserts.
      if (std::strstr(error.what_without_backtrace(), "out of bounds") == nullptr) throw;
      cuda_stub_asserts();
      C10_CUDA_CHECK(cudaErrorAssert);
    }
  }
  call.resize();
  size_t num_returns = schema.returns().size();
  for (size_t i = 0; i < num_returns; i++) call.give((*stack)[stack->size() - num_returns + i]);
}

// Whole tensors are copied by cudaMemcpyAsync, everything else by a kernel.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  bool is_whole = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() && self.is_contiguous() && source.is_contiguous();
  if (is_whole || !self.is_cuda() || !source.is_cuda()) return at::native::copy_(self, source, non_blocking);
  wait_and_count(source.device());
  wait_and_count(self.device());
  auto target = same_bytes(self);
  at::native::copy_(target, same_bytes(source), false);
  return self;
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  return false;
}

const std::set<std::string> KEPT = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::_local_scalar_dense",
    "aten::_efficientzerotensor", "aten::is_set_to", "aten::copy_", "aten::is_pinned", "aten::_pin_memory",
};

std::vector<torch::Library> serve() {
  std::vector<torch::Library> libraries;
  auto& dispatcher = c10::Dispatcher::singleton();
  libraries.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  torch::Library& aten = libraries.back();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) || KEPT.count(name.name) || is_view(op->schema())) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
  aten.impl("copy_", TORCH_FN(copy));
  // The others are kernels of CUDA's own.
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  return libraries;
}

const auto served = serve();

}  // namespace
