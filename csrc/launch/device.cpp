#include "device.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_check.h"

namespace flash3 {
namespace {

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  FLASH3_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, index));
  return value;
}

std::vector<Device> query_devices() {
  int count = 0;
  FLASH3_CUDA_CHECK(cudaGetDeviceCount(&count));
  std::vector<Device> devices;
  for (int index = 0; index < count; ++index) {
    devices.push_back({.index = index,
                       .num_sms = attribute(cudaDevAttrMultiProcessorCount, index),
                       .capability_major = attribute(cudaDevAttrComputeCapabilityMajor, index),
                       .capability_minor = attribute(cudaDevAttrComputeCapabilityMinor, index)});
  }
  return devices;
}

[[noreturn]] void throw_not_hopper(Device const& device) {
  cudaDeviceProp properties{};
  FLASH3_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
  throw std::runtime_error(
      "flash3 runs on GPUs of compute capability 9.0 (Hopper: H100, H200, GH200); cuda:" +
      std::to_string(device.index) + " (" + properties.name + ") has " +
      std::to_string(device.capability_major) + "." + std::to_string(device.capability_minor));
}

}  // namespace

Device const& hopper_device(int index) {
  static std::vector<Device> const devices = query_devices();
  if (index < 0 || index >= static_cast<int>(devices.size())) {
    throw std::runtime_error("flash3: no device cuda:" + std::to_string(index) + " among the " +
                             std::to_string(devices.size()) + " visible ones");
  }
  Device const& device = devices[static_cast<std::size_t>(index)];
  if (device.capability_major != 9 || device.capability_minor != 0) throw_not_hopper(device);
  return device;
}

}  // namespace flash3
