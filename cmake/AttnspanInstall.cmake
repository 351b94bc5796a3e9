# cmake --install: headers, library, command, a CMake package and a pkg-config file. The installed tree may be
# moved: both files find their prefix from where they lie.
include(CMakePackageConfigHelpers)

set(attnspan_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/attnspan)
install(TARGETS attnspan EXPORT attnspanTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/include/attnspan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT attnspanTargets NAMESPACE attnspan:: DESTINATION ${attnspan_package_dir})
if(TARGET attnspan_cli)
  install(TARGETS attnspan_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# What a program that links the static library links too. A shared library carries it already.
get_target_property(attnspan_type attnspan TYPE)
get_target_property(attnspan_links attnspan LINK_LIBRARIES)
set(attnspan_dependencies "")  # packages that attnspanConfig.cmake looks for
set(attnspan_pc_requires "")
set(attnspan_pc_libs "")
if(attnspan_type STREQUAL "STATIC_LIBRARY")
  if("hwy::hwy" IN_LIST attnspan_links)
    list(APPEND attnspan_dependencies hwy)
    if(TARGET PkgConfig::hwy)
      string(APPEND attnspan_pc_requires "libhwy")
    else()
      string(APPEND attnspan_pc_libs " -lhwy")
    endif()
  endif()
  if("TBB::tbb" IN_LIST attnspan_links)
    list(APPEND attnspan_dependencies TBB)
    string(APPEND attnspan_pc_libs " -ltbb")  # Debian 12 and Ubuntu 22.04 have no tbb.pc
  endif()
  if("CUDA::cudart_static" IN_LIST attnspan_links)
    list(APPEND attnspan_dependencies CUDAToolkit)
    string(APPEND attnspan_pc_libs " ${CUDA_cudart_static_LIBRARY} -lrt")
  endif()
  if(APPLE)
    string(APPEND attnspan_pc_libs " -framework Metal -framework Foundation -lc++")
  else()
    find_package(Threads REQUIRED)
    string(APPEND attnspan_pc_libs " -lstdc++ -lm ${CMAKE_THREAD_LIBS_INIT} -l${CMAKE_DL_LIBS}")
  endif()
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/attnspanConfig.cmake.in
  ${CMAKE_BINARY_DIR}/attnspanConfig.cmake
  INSTALL_DESTINATION ${attnspan_package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/attnspanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/attnspanConfig.cmake ${CMAKE_BINARY_DIR}/attnspanConfigVersion.cmake
  DESTINATION ${attnspan_package_dir})

file(RELATIVE_PATH attnspan_pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file(${CMAKE_CURRENT_LIST_DIR}/attnspan.pc.in ${CMAKE_BINARY_DIR}/attnspan.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/attnspan.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
