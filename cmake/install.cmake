# Installs ringlm::ringlm so that find_package(ringlm) works.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(RINGLM_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/ringlm)
install(TARGETS ringlm EXPORT ringlmTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
if(TARGET ringlm_cuda)
  install(TARGETS ringlm_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
endif()
install(DIRECTORY csrc/include/ringlm DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)
install(EXPORT ringlmTargets NAMESPACE ringlm:: DESTINATION ${RINGLM_CMAKE_DIR} COMPONENT cpp)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/ringlmConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES cmake/ringlmConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/ringlmConfigVersion.cmake
  DESTINATION ${RINGLM_CMAKE_DIR} COMPONENT cpp)
