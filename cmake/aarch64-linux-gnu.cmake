# Cross-compiles for 64-bit ARM with Debian's g++-aarch64-linux-gnu; tests run under qemu-user.
#   cmake -S . -B build/arm -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# With -DRINGLM_CUDA=ON, the nvcc of this machine. A toolkit without its cross-compilation packages has all but
# the runtime: its headers serve both machines, and RINGLM_CUDART is a folder with ARM's libcudart_static.a.
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES RINGLM_CUDART)
if(RINGLM_CUDART)
  set(CMAKE_CUDA_FLAGS_INIT "-target-dir ${CMAKE_HOST_SYSTEM_PROCESSOR}-linux -L${RINGLM_CUDART}")
endif()
