// The executable `mlxcel`: starts the program that is appended to it, which it unpacks at its first start.
//
// What is appended is a tar archive in gzip members and a trailer: "mlxcel\0\1", the archive's size as eight bytes,
// the least first, and its digest as 16 letters. It is unpacked into `$MLXCEL_HOME/binary/<digest>`, under another
// name until it is whole, and executed from there ever after. This file knows where Python lies in it and no more;
// it is linked statically, so that nothing of the system is needed before the system's C library is.

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

#define PYTHON "bin/python3"
#define PROGRAM "bin/mlxcel"
#define NEW_PREFIX ".new-"
#define HINT "MLXCEL_HOME names another folder for it"
#define ANEW "remove it and start again, or " HINT
#define CLOSED "chmod o-w ends that, or " HINT
#define MAGIC "mlxcel\0\1"

enum { MAGIC_SIZE = 8, SIZE_SIZE = 8, DIGEST_SIZE = 16, TRAILER_SIZE = MAGIC_SIZE + SIZE_SIZE + DIGEST_SIZE };
enum { BLOCK = 512, CHUNK = 1 << 16, UNUSED_S = 30 * 24 * 60 * 60 };

extern char **environ;

// The archive, as far as it has been read.
struct archive {
  FILE *file;
  uint64_t left;  // compressed bytes not yet read from the file
  bool in_member;  // whether a gzip member has begun and not ended
  z_stream inflating;
  unsigned char input[CHUNK];
};

static char partial[PATH_MAX];  // what is being unpacked and goes if that fails

static void remove_tree(int parent, const char *name);

// Say what is wrong, as the program itself would, and end.
static _Noreturn void fail(const char *hint, const char *format, ...) {
  va_list values;
  va_start(values, format);
  fputs("error: ", stderr);
  vfprintf(stderr, format, values);
  fputc('\n', stderr);
  va_end(values);
  if (hint) fprintf(stderr, "hint: %s\n", hint);
  if (*partial) remove_tree(AT_FDCWD, partial);
  exit(1);
}

static void join(char path[PATH_MAX], const char *folder, const char *name) {
  if (snprintf(path, PATH_MAX, "%s/%s", folder, name) >= PATH_MAX) fail(HINT, "%s: the path is too long", folder);
}

// Refuse what somebody else than this person and root has made or can change.
static void trust(int opened, const char *path) {
  struct stat found;
  if (fstat(opened, &found) != 0) fail(HINT, "%s cannot be looked at: %s", path, strerror(errno));
  if (found.st_uid != geteuid() && found.st_uid != 0) fail(ANEW, "%s belongs to somebody else", path);
  if (found.st_mode & 022) fail(ANEW, "%s is not safe: others may write to it", path);
}

// Remove a file, or a folder and what is in it. What cannot be removed stays.
static void remove_tree(int parent, const char *name) {
  if (unlinkat(parent, name, 0) == 0) return;
  int folder = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  DIR *entries = folder < 0 ? NULL : fdopendir(folder);
  if (!entries) return;
  for (struct dirent *entry; (entry = readdir(entries));)
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) remove_tree(folder, entry->d_name);
  closedir(entries);
  unlinkat(parent, name, AT_REMOVEDIR);
}

// Open this executable behind its own code: where the archive begins. `digest` gets a terminated string.
static struct archive *open_archive(char digest[DIGEST_SIZE + 1]) {
  static struct archive archive;
  archive.file = fopen("/proc/self/exe", "rbe");
  if (!archive.file) archive.file = fopen((const char *)getauxval(AT_EXECFN), "rbe");
  if (!archive.file) fail(NULL, "this executable cannot be read: %s", strerror(errno));
  unsigned char trailer[TRAILER_SIZE];
  if (fseeko(archive.file, -TRAILER_SIZE, SEEK_END) != 0 || fread(trailer, TRAILER_SIZE, 1, archive.file) != 1 ||
      memcmp(trailer, MAGIC, MAGIC_SIZE) != 0)
    fail("fetch it again", "this executable is not whole");
  for (int i = 0; i < SIZE_SIZE; i++) archive.left |= (uint64_t)trailer[MAGIC_SIZE + i] << 8 * i;
  memcpy(digest, trailer + MAGIC_SIZE + SIZE_SIZE, DIGEST_SIZE);
  if (fseeko(archive.file, -(off_t)archive.left - TRAILER_SIZE, SEEK_END) != 0)
    fail("fetch it again", "this executable is not whole");
  return &archive;
}

// Inflate once, into what the stream has to write to. False: the archive has ended.
static bool inflate_more(struct archive *archive) {
  z_stream *inflating = &archive->inflating;
  if (inflating->avail_in == 0) {
    inflating->next_in = archive->input;
    inflating->avail_in = fread(archive->input, 1, archive->left < CHUNK ? archive->left : CHUNK, archive->file);
    archive->left -= inflating->avail_in;
    if (inflating->avail_in == 0) return false;
  }
  int said = inflate(inflating, Z_NO_FLUSH);
  archive->in_member = said != Z_STREAM_END;
  if (said == Z_STREAM_END) said = inflateReset(inflating);
  if (said != Z_OK) fail("fetch it again", "this executable is damaged");
  return true;
}

// The next `size` bytes of the unpacked archive.
static void take(struct archive *archive, void *bytes, size_t size) {
  archive->inflating.next_out = bytes;
  archive->inflating.avail_out = size;
  while (archive->inflating.avail_out > 0)
    if (!inflate_more(archive)) fail("fetch it again", "this executable is not whole");
}

// Read what pads the archive, up to the last member's sum of all that was taken from it.
static void take_rest(struct archive *archive) {
  unsigned char rest[BLOCK];
  do {
    archive->inflating.next_out = rest;
    archive->inflating.avail_out = BLOCK;
  } while (inflate_more(archive));
  if (archive->in_member) fail("fetch it again", "this executable is not whole");
}

static void unpack_file(struct archive *archive, int folder, const char *name, mode_t mode, uint64_t size) {
  static unsigned char bytes[CHUNK];
  int file = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (file < 0) fail(HINT, "%s/%s cannot be unpacked: %s", partial, name, strerror(errno));
  for (uint64_t padded = (size + BLOCK - 1) / BLOCK * BLOCK; padded > 0;) {
    size_t taken = padded < CHUNK ? padded : CHUNK;
    take(archive, bytes, taken);
    padded -= taken;
    size_t wanted = size < taken ? size : taken;
    size -= wanted;
    for (size_t done = 0; done < wanted;) {
      ssize_t more = write(file, bytes + done, wanted - done);
      if (more < 0) fail(HINT, "%s/%s cannot be unpacked: %s", partial, name, strerror(errno));
      done += more;
    }
  }
  if (close(file) != 0) fail(HINT, "%s/%s cannot be unpacked: %s", partial, name, strerror(errno));
}

// Whether the header's sum, at 148, is that of its bytes with blanks for the sum.
static bool is_header(const char header[BLOCK]) {
  unsigned long sum = 0;
  for (int i = 0; i < BLOCK; i++) sum += i < 148 || i >= 156 ? (unsigned char)header[i] : ' ';
  return strtoul(header + 148, NULL, 8) == sum;
}

// Unpack the whole archive (ustar: files and folders) into a folder, which is `partial`.
static void unpack(struct archive *archive, int folder) {
  if (inflateInit2(&archive->inflating, 16 + MAX_WBITS) != Z_OK) fail(NULL, "there is not enough memory to unpack");
  for (;;) {
    char header[BLOCK + 1] = {0}, name[BLOCK];
    take(archive, header, BLOCK);
    if (!*header) break;
    if (!is_header(header)) fail("fetch it again", "this executable is damaged");
    // Name, mode, size and kind lie at 0, 100, 124 and 156, what stands before a long name at 345.
    snprintf(name, sizeof name, "%.155s%s%.100s", header + 345, header[345] ? "/" : "", header);
    mode_t mode = strtoul(header + 100, NULL, 8);
    if (header[156] != '5') {
      unpack_file(archive, folder, name, mode, strtoull(header + 124, NULL, 8));
    } else if (mkdirat(folder, name, mode) != 0) {
      fail(HINT, "%s/%s cannot be made: %s", partial, name, strerror(errno));
    }
  }
  take_rest(archive);
  inflateEnd(&archive->inflating);
  // A machine that loses power must not find the name without the files.
  if (syncfs(folder) != 0) fail(HINT, "%s cannot be written: %s", partial, strerror(errno));
}

// Have HOME set: as it is, else as the system's list of users says, else to the one folder that is given.
static void settle_home(void) {
  const char *home = getenv("HOME"), *given = getenv("MLXCEL_HOME");
  if (home && *home) return;
  FILE *users = fopen("/etc/passwd", "re");
  for (struct passwd *user; users && (user = fgetpwent(users));)
    if (user->pw_uid == getuid() && setenv("HOME", user->pw_dir, 1) == 0) return;
  if (!given || given[0] != '/') fail("HOME names one, or MLXCEL_HOME a folder for everything", "there is no home folder");
  setenv("HOME", given, 1);
}

// Where programs are unpacked: beside the models, as `engine/model/store.py` finds them.
static void programs_folder(char folder[PATH_MAX]) {
  const char *given = getenv("MLXCEL_HOME");
  char here[PATH_MAX];
  if (!given || !*given) {
    join(folder, getenv("HOME"), ".cache/mlxcel/binary");
  } else if (given[0] == '~' && (given[1] == '/' || !given[1])) {
    char rest[PATH_MAX];
    join(rest, given + 1, "binary");
    join(folder, getenv("HOME"), rest + 1);
  } else if (given[0] == '/') {
    join(folder, given, "binary");
  } else {
    if (!getcwd(here, sizeof here)) fail(NULL, "this folder has gone: %s", strerror(errno));
    join(folder, here, given);
    join(here, folder, "binary");
    strcpy(folder, here);
  }
}

// Make a folder and those it is in. It is for whoever may run what is in it; those are as this person's files are.
static void make_folders(char *folder) {
  for (char *slash = folder;; *slash = '/') {
    slash = strchr(slash + 1, '/');
    if (slash) *slash = 0;
    mode_t own = slash ? 0 : umask(022);
    bool made = mkdir(folder, 0755) == 0 || errno == EEXIST || access(folder, F_OK) == 0;
    if (!made) fail(HINT, "%s cannot be made: %s", folder, strerror(errno));
    if (slash) continue;
    umask(own);
    return;
  }
}

// The folder of programs, made where it is not. Who else may write to it, or move it away, could have this person run
// anything. The owner and the group of the folder around it are trusted: the group is often a person's own.
static int open_programs(char *path) {
  int programs = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (programs < 0) {
    make_folders(path);
    programs = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
  }
  if (programs < 0) fail(HINT, "%s cannot be opened: %s", path, strerror(errno));
  trust(programs, path);
  struct stat around;
  if (fstatat(programs, "..", &around, 0) != 0) fail(HINT, "%s cannot be entered: %s", path, strerror(errno));
  if (around.st_mode & S_IWOTH && !(around.st_mode & S_ISVTX)) fail(CLOSED, "others may move %s away", path);
  return programs;
}

// Hold the program for as long as this process lives, and note that it was started (in vain where it is root's).
// False: it is not there, or it is being removed.
static bool hold(int programs, const char *digest, const char *whole) {
  int folder = openat(programs, digest, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);  // stays open in the program
  if (folder < 0 && errno == ENOENT) return false;
  if (folder < 0) fail(ANEW, "%s cannot be opened: %s", whole, strerror(errno));
  trust(folder, whole);
  if (flock(folder, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  futimens(folder, NULL);
  return true;
}

static bool is_unused(int programs, const char *name) {
  struct stat found;
  int folder = openat(programs, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  return folder >= 0 && fstat(folder, &found) == 0 && found.st_mtime < time(NULL) - UNUSED_S &&
         flock(folder, LOCK_EX | LOCK_NB) == 0;  // until this process ends
}

// Whether others may run what root unpacked here: their starts cannot be noted, so that nothing is known to be unused.
static bool is_shared(int programs) {
  struct stat found;
  return geteuid() == 0 && (fstat(programs, &found) != 0 || found.st_mode & 077);
}

// Remove what killed starts left, and other versions that nobody has started for long. The lock is held.
static void sweep(int programs, const char *digest) {
  bool shared = is_shared(programs);
  int listed = openat(programs, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *entries = listed < 0 ? NULL : fdopendir(listed);
  for (struct dirent *entry; entries && (entry = readdir(entries));) {
    const char *name = entry->d_name;
    char gone[PATH_MAX];
    snprintf(gone, sizeof gone, NEW_PREFIX "%s", name);
    if (strncmp(name, NEW_PREFIX, strlen(NEW_PREFIX)) == 0) {
      remove_tree(programs, name);
    } else if (!shared && strlen(name) == DIGEST_SIZE && strspn(name, "0123456789abcdef") == DIGEST_SIZE &&
               strcmp(name, digest) != 0 && is_unused(programs, name) &&
               renameat(programs, name, programs, gone) == 0) {
      remove_tree(programs, gone);
    }
  }
  if (entries) closedir(entries);
}

// Unpack into the folder `digest`, readable by all. A start that is killed leaves a folder of another name, which goes.
static void unpack_new(struct archive *archive, int programs, const char *path, const char *digest) {
  char name[sizeof NEW_PREFIX + DIGEST_SIZE];
  mode_t own = umask(022);
  snprintf(name, sizeof name, NEW_PREFIX "%s", digest);
  join(partial, path, name);
  if (mkdirat(programs, name, 0755) != 0) fail(HINT, "%s cannot be made: %s", partial, strerror(errno));
  int folder = openat(programs, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder < 0) fail(HINT, "%s cannot be opened: %s", partial, strerror(errno));
  trust(folder, partial);
  unpack(archive, folder);
  close(folder);
  if (renameat(programs, name, programs, digest) != 0)
    fail(HINT, "%s/%s cannot be made: %s", path, digest, strerror(errno));
  *partial = 0;
  umask(own);
}

// Have the program there, unpacked by one start at a time. Whoever put it there has yet to be looked at.
static void unpack_once(struct archive *archive, int programs, const char *path, const char *digest) {
  char locked[PATH_MAX];
  join(locked, path, ".lock");
  int lock = openat(programs, ".lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);  // until this process ends
  if (lock < 0) fail(HINT, "%s cannot be written: %s", locked, strerror(errno));
  trust(lock, locked);
  if (flock(lock, LOCK_EX) != 0) fail(HINT, "%s cannot be locked: %s", locked, strerror(errno));
  if (faccessat(programs, digest, F_OK, 0) == 0) return;  // by the start that held the lock until now
  sweep(programs, digest);
  if (isatty(STDERR_FILENO)) fprintf(stderr, "unpacking into %s/%s, once\n", path, digest);
  unpack_new(archive, programs, path, digest);
}

// Settings that are meant for another Python go; this one, in `folder`, and its children load what is theirs alone.
static void settle_environment(const char *folder) {
  for (char **entry = environ; *entry;) {
    char name[CHUNK];
    size_t length = strcspn(*entry, "=");
    if (strncmp(*entry, "PYTHON", 6) == 0 && length < sizeof name) {
      snprintf(name, sizeof name, "%.*s", (int)length, *entry);
      unsetenv(name);
      entry = environ;
    } else {
      entry++;
    }
  }
  setenv("PYTHONSAFEPATH", "1", 1);
  setenv("PYTHONNOUSERSITE", "1", 1);
  // Where /proc is not mounted, the dynamic loader has to be told where its libraries are.
  if (access("/proc/self/exe", F_OK) != 0) setenv("LD_ORIGIN_PATH", folder, 1);
}

int main(int argc, char **argv) {
  char digest[DIGEST_SIZE + 1] = {0}, path[PATH_MAX], whole[PATH_MAX], folder[PATH_MAX];
  char python[PATH_MAX], program[PATH_MAX];
  struct archive *archive = open_archive(digest);
  settle_home();
  programs_folder(path);
  join(whole, path, digest);
  int programs = open_programs(path);
  if (!hold(programs, digest, whole)) {
    unpack_once(archive, programs, path, digest);
    hold(programs, digest, whole);  // looks at it again; while the lock is held, nobody removes it
  }
  join(python, whole, PYTHON);
  join(program, whole, PROGRAM);
  join(folder, whole, "bin");
  settle_environment(folder);
  char **arguments = calloc(argc + 3, sizeof *arguments);
  if (!arguments) fail(NULL, "there is not enough memory to start");
  arguments[0] = python;
  arguments[1] = "-I";
  arguments[2] = program;
  for (int i = 1; i < argc; i++) arguments[i + 2] = argv[i];
  execv(python, arguments);
  int fault = errno;
  const char *hint = fault == EACCES ? HINT : "remove that folder, and it is unpacked again";
  if (fault == ENOENT && access(python, F_OK) == 0) hint = "it needs the GNU C library, and this system has another";
  fail(hint, "%s cannot be started: %s", python, strerror(fault));
}
