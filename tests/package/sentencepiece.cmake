# What a program that uses SentencePiece is linked with, by the header of its version and by whether
# Abseil is there: all of them are made up.
file(REMOVE_RECURSE ${WORK_DIR})
file(WRITE ${WORK_DIR}/absl/absl-config.cmake
     "add_library(absl::strings INTERFACE IMPORTED)\nadd_library(absl::status INTERFACE IMPORTED)\n")

function(expect_libraries expected include where_absl_is)
  file(WRITE ${WORK_DIR}/include/sentencepiece_processor.h "#pragma once\n#include ${include}\n")
  execute_process(
      COMMAND ${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/package/sentencepiece -B ${WORK_DIR}/build -G Ninja --fresh
              -DSOURCE_DIR=${SOURCE_DIR} -DSENTENCEPIECE_LIBRARY=libsentencepiece.so
              -DSENTENCEPIECE_INCLUDE_DIR=${WORK_DIR}/include ${where_absl_is} "-DEXPECTED=${expected}"
      RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "#include ${include}, ${where_absl_is}:\n${output}")
  endif()
endfunction()

set(present -Dabsl_DIR=${WORK_DIR}/absl)
set(absent -DCMAKE_DISABLE_FIND_PACKAGE_absl=ON)
expect_libraries("libsentencepiece.so" "<string_view>" ${present})
expect_libraries("libsentencepiece.so" "<string_view>" ${absent})
foreach(include "<absl/strings/string_view.h>" "\"absl/status/status.h\"")
  expect_libraries("libsentencepiece.so;absl::strings;absl::status" ${include} ${present})
  expect_libraries("" ${include} ${absent})
endforeach()
