# cmake -DBUILD=... -DPREFIX=... -P install_tree.cmake: installs, moves the tree (it must not remember where it
# was installed), and runs the command from there.
file(REMOVE_RECURSE ${PREFIX} ${PREFIX}_before_moving)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX}_before_moving
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${PREFIX}_before_moving ${PREFIX})
if(EXISTS ${PREFIX}/bin/attnspan)
  execute_process(COMMAND ${PREFIX}/bin/attnspan info COMMAND_ERROR_IS_FATAL ANY)
endif()
