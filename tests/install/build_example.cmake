# Builds the example in SOURCE against the package in PREFIX, by find_package or by pkg-config, and runs it.
file(REMOVE_RECURSE ${OUT})
file(MAKE_DIRECTORY ${OUT})
if(WAY STREQUAL "find_package")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${OUT} -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${PREFIX}
            -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${OUT} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
else()
  set(ENV{PKG_CONFIG_PATH} ${PREFIX}/${LIBDIR}/pkgconfig)
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs attnspan OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  if(EXISTS ${SOURCE}/attention.c)
    set(compile ${C_COMPILER} -std=c99 -Wall -Wextra -Wpedantic ${SOURCE}/attention.c)
  else()
    set(compile ${CXX_COMPILER} -std=c++20 -Wall -Wextra ${SOURCE}/attention.cpp)
  endif()
  execute_process(COMMAND ${compile} -o ${OUT}/attention ${flags} COMMAND_ERROR_IS_FATAL ANY)
endif()
execute_process(COMMAND ${OUT}/attention COMMAND_ERROR_IS_FATAL ANY)
