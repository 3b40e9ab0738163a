# The CUDA backend: libringlm_cuda.so, which the core loads when a model first asks for it (csrc/cuda/library.h).
# docs/cuda.md explains the options.

# All but the door, library.cu. The tests compile these for the host.
set(ringlm_cuda_kernels
  csrc/cuda/attend.cu
  csrc/cuda/cuda_ops.cu
  csrc/cuda/embed.cu
  csrc/cuda/experts.cu
  csrc/cuda/gemm.cu
  csrc/cuda/gemv.cu
  csrc/cuda/head.cu
  csrc/cuda/load.cu
  csrc/cuda/norm.cu
  csrc/cuda/pack.cu
  csrc/cuda/prefill_attention.cu
  csrc/cuda/region.cu
  csrc/cuda/rope_append.cu
  csrc/cuda/runtime.cu
)

# What is at the door between the two is compared when the library is loaded: a hash of the headers whose
# layouts cross it. Loading a library of another build is an error, not a crash.
file(GLOB headers CONFIGURE_DEPENDS csrc/include/ringlm/*.h csrc/ops/*.h csrc/kv/*.h csrc/model/*.h csrc/gguf/*.h)
list(APPEND headers ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/library.h)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${headers})
set(hashes "")
foreach(header IN LISTS headers)
  file(SHA256 ${header} hash)
  string(APPEND hashes ${hash})
endforeach()
string(SHA256 hash "${hashes}${CMAKE_CXX_COMPILER_ID}")
string(SUBSTRING ${hash} 0 12 hash)
set(RINGLM_BUILD "${PROJECT_VERSION}-${hash}")
set_source_files_properties(csrc/decoder/cuda_library.cpp PROPERTIES
  COMPILE_DEFINITIONS "RINGLM_BUILD=\"${RINGLM_BUILD}\"")

# Of the library: nothing leaves it but its entry, so its copy of the core never meets that of the loader.
function(ringlm_cuda_door target)
  set(map ${PROJECT_SOURCE_DIR}/cmake/ringlm_cuda.map)
  target_link_options(${target} PRIVATE -Wl,--version-script,${map} -Wl,--no-undefined)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON LINK_DEPENDS ${map})
endfunction()

if(NOT RINGLM_CUDA)
  if(RINGLM_CUDA_GPU_TESTS)
    message(FATAL_ERROR "RINGLM_CUDA_GPU_TESTS needs RINGLM_CUDA=ON")
  endif()
  return()
endif()

# CMake looks for nvcc on PATH; toolkits are often installed without being there.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(RINGLM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(RINGLM_NVCC)
    set(CMAKE_CUDA_COMPILER ${RINGLM_NVCC})
  endif()
endif()
list(SORT RINGLM_CUDA_ARCHS COMPARE NATURAL)
set(CMAKE_CUDA_ARCHITECTURES ${RINGLM_CUDA_ARCHS})
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND -real)
list(POP_BACK RINGLM_CUDA_ARCHS newest)
list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest}-virtual)
list(APPEND RINGLM_CUDA_ARCHS ${newest})
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(RINGLM_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA backend: no, as there is no nvcc that works here")
    return()
  endif()
  message(FATAL_ERROR "RINGLM_CUDA is ON, but there is no nvcc that works here. Put that of a CUDA toolkit, 12.2 or newer, "
    "on PATH or give -DCMAKE_CUDA_COMPILER=.../nvcc; -DRINGLM_CUDA=OFF builds for the CPU.")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.2)
  message(FATAL_ERROR "CUDA ${CMAKE_CUDA_COMPILER_VERSION} is too old: 12.2 or newer is needed; "
    "-DRINGLM_CUDA=OFF builds for the CPU")
endif()
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # of nvcc 12, to CMake before 3.25.2
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
message(STATUS "CUDA backend: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, for ${CMAKE_CUDA_ARCHITECTURES}")

add_library(ringlm_cuda_objects OBJECT ${ringlm_cuda_kernels})
add_library(ringlm_cuda MODULE csrc/cuda/library.cu $<TARGET_OBJECTS:ringlm_cuda_objects>)
foreach(target ringlm_cuda_objects ringlm_cuda)
  target_include_directories(${target} PRIVATE csrc)
  target_link_libraries(${target} PRIVATE ringlm)  # what it uses of it, as a copy of its own
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Wall,-ffp-contract=off>")
  set_target_properties(${target} PROPERTIES
    CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endforeach()
target_compile_definitions(ringlm_cuda PRIVATE
  "RINGLM_BUILD=\"${RINGLM_BUILD}\"" "RINGLM_CUDA_ARCHS=\"$<JOIN:${RINGLM_CUDA_ARCHS}, >\"")
ringlm_cuda_door(ringlm_cuda)
if(RINGLM_PYTHON)
  install(TARGETS ringlm_cuda LIBRARY DESTINATION ringlm COMPONENT python)
endif()

if(RINGLM_CUDA_GPU_TESTS)
  enable_testing()
  add_subdirectory(tests/cuda/gpu)
endif()
