# What `cmake --install` puts where, for C++ users; and the component "python", which is what a wheel ships.
include(CMakePackageConfigHelpers)

target_compile_features(intarsia INTERFACE cxx_std_20)

# Templates of the standard library are visible whatever -fvisibility says; the map keeps them out of the ABI.
set(export_map ${PROJECT_SOURCE_DIR}/cmake/exports.map)
foreach(library intarsia intarsia_cpu intarsia_torch)
  if(TARGET ${library})
    target_link_options(${library} PRIVATE LINKER:--version-script=${export_map})
    set_property(TARGET ${library} APPEND PROPERTY LINK_DEPENDS ${export_map})
  endif()
endforeach()

# ---- C++ users: headers, libraries, find_package(intarsia CONFIG), pkg-config, intarsia-ops
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/intarsia)
install(DIRECTORY include/intarsia TYPE INCLUDE FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_BINARY_DIR}/include/intarsia/version.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/intarsia)
install(TARGETS intarsia EXPORT intarsia-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET intarsia_cpu)  # opened beside libintarsia.so
  install(TARGETS intarsia_cpu LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET intarsia-ops)
  set_target_properties(intarsia-ops PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS intarsia-ops RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(EXPORT intarsia-targets NAMESPACE intarsia:: DESTINATION ${config_dir})

configure_package_config_file(cmake/intarsia-config.cmake.in ${PROJECT_BINARY_DIR}/intarsia-config.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/intarsia-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/intarsia-config.cmake ${PROJECT_BINARY_DIR}/intarsia-config-version.cmake
        DESTINATION ${config_dir})

file(RELATIVE_PATH pkgconfig_to_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(cmake/intarsia.pc.in ${PROJECT_BINARY_DIR}/intarsia.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/intarsia.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# ---- the wheel, packed from the build directory as it is, so the rpath is the final one from the start. One file per library,
# since a wheel turns symbolic links into copies: Python loads libintarsia.so first, and the shim, which asks for
# libintarsia.so.0, is given the one that is loaded, since the loader compares SONAMEs.
set_target_properties(intarsia PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
install(FILES $<TARGET_FILE:intarsia> DESTINATION intarsia RENAME libintarsia.so
        PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE
        COMPONENT python EXCLUDE_FROM_ALL)
foreach(library intarsia_cpu intarsia_torch)
  if(TARGET ${library})
    install(TARGETS ${library} LIBRARY DESTINATION intarsia COMPONENT python EXCLUDE_FROM_ALL)
  endif()
endforeach()

if(INTARSIA_TESTS)
  enable_testing()
  add_subdirectory(tests/packaging)
endif()
