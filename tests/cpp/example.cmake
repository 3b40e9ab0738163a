# Installs the library, builds examples/cpp against the installed package and compares what it prints with the
# reference backend. Arguments: SOURCE, BUILD, COMPILER, FLAGS, WRITE_TINY_MODEL.
set(work ${BUILD}/example)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE out)
  set(out ${out} PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --component cpp)
run(${CMAKE_COMMAND} -S ${SOURCE}/examples/cpp -B ${work}/build -DCMAKE_PREFIX_PATH=${work}/prefix
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_FLAGS=${FLAGS})
run(${CMAKE_COMMAND} --build ${work}/build)

set(arguments ${work}/tiny.gguf 16 3 1 4 1 5)
run(${WRITE_TINY_MODEL} ${arguments})
set(expected ${out})
run(${work}/build/continue_tokens ${arguments})
if(NOT out STREQUAL expected)
  message(FATAL_ERROR "the example printed\n${out}the reference backend\n${expected}")
endif()
file(REMOVE_RECURSE ${work})
