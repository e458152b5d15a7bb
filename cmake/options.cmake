# Warnings, sanitizers and coverage, as one interface target that is never installed.
add_library(intarsia_options INTERFACE)
target_compile_options(intarsia_options INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wpedantic -Wshadow>
  $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>)  # designated initialisers leave fields at their defaults
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(intarsia_options INTERFACE -Wno-restrict)  # false alarms on std::string (GCC bug 105651)
endif()
if(INTARSIA_WERROR)
  target_compile_options(intarsia_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
endif()
if(INTARSIA_SANITIZE)
  target_compile_options(intarsia_options INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${INTARSIA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g>)
  target_link_options(intarsia_options INTERFACE -fsanitize=${INTARSIA_SANITIZE})
endif()
if(INTARSIA_COVERAGE)
  target_compile_options(intarsia_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:--coverage -O1>)
  target_link_options(intarsia_options INTERFACE --coverage)
endif()
