# Flags that every target of ours carries, and the one way to add a test.

add_library(qwend_flags INTERFACE)
target_include_directories(qwend_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(qwend_flags INTERFACE -Wall -Wextra $<$<BOOL:${QWEND_WERROR}>:-Werror>)
# A fused multiply-add must stand where it is written and nowhere else, or bits would depend on the compiler.
target_compile_options(qwend_flags INTERFACE -ffp-contract=off)
if(QWEND_SANITIZE)
  target_compile_options(qwend_flags INTERFACE -fsanitize=${QWEND_SANITIZE} -fno-omit-frame-pointer -g1)
  target_compile_options(qwend_flags INTERFACE
    $<$<STREQUAL:${QWEND_SANITIZE},address$<COMMA>undefined>:-fno-sanitize-recover=undefined>)
  target_link_options(qwend_flags INTERFACE -fsanitize=${QWEND_SANITIZE})
endif()

# qwend_library(name SOURCES a.cc ... LIBS other ...)
function(qwend_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC qwend_flags ${ARG_LIBS})
endfunction()

# qwend_test(name SOURCES a.cc ... LIBS other ... LABELS unit ...)
function(qwend_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE qwend_flags ${ARG_LIBS} GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE QWEND_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 600)
endfunction()
