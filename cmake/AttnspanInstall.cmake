# cmake --install: headers, library, command, a CMake package and a pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS attnspan EXPORT attnspanTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/include/attnspan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT attnspanTargets NAMESPACE attnspan:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/attnspan)
if(TARGET attnspan_cli)
  install(TARGETS attnspan_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

get_target_property(attnspan_type attnspan TYPE)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/attnspanConfig.cmake.in
  ${CMAKE_BINARY_DIR}/attnspanConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/attnspan)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/attnspanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/attnspanConfig.cmake ${CMAKE_BINARY_DIR}/attnspanConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/attnspan)

configure_file(${CMAKE_CURRENT_LIST_DIR}/attnspan.pc.in ${CMAKE_BINARY_DIR}/attnspan.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/attnspan.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
