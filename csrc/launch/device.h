// What the host must know of a GPU, asked once per process.
#pragma once

namespace flash3 {

struct Device {
  int index;
  int num_sms;
  int capability_major, capability_minor;
};

// Attributes of a visible device. Throws std::runtime_error, with the device's name and capability,
// unless it is one that the kernels run on: compute capability 9.0 (Hopper), no other, because
// wgmma and setmaxnreg exist there alone.
Device const& hopper_device(int index);

}  // namespace flash3
