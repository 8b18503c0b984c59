/* Whether facts about a module tree still hold, each by identity: see unchanged.py.
 *
 * Of a torch.Tensor its version counter and address are read by torch's own accessors, called
 * without what Python puts around a call. Of dictionaries a watcher counts the events: while their
 * number stays, no watched dictionary was written to, and none is read. Only Python 3.12 has one
 * that can be relied on: 3.13 does not tell it of every attribute that is set on an instance. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyGetSetDescrObject *version_of; /* torch.Tensor._version */
static PyMethodDescrObject *address_of; /* torch.Tensor.data_ptr */
static PyObject *whatever;              /* stands for a value that does not matter */

static unsigned long long events = 1; /* of all watched dictionaries; 0 is before any */

#define HAS_WATCHER (PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000)

#if HAS_WATCHER
static int watcher = -1;

static int count_event(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
    events++;
    return 0;
}

static int is_watching(void) { return watcher >= 0; }

static int watch_dict(PyObject *dict) { return PyDict_Watch(watcher, dict); }
#else
static int is_watching(void) { return 0; }

static int watch_dict(PyObject *dict) { return 0; }
#endif

/* 1, 0, or -1 with an exception, as all that follow: (object, its class, ...). */
static int same_classes(PyObject *facts) {
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(facts); i += 2)
        if ((PyObject *)Py_TYPE(PyTuple_GET_ITEM(facts, i)) != PyTuple_GET_ITEM(facts, i + 1))
            return 0;
    return 1;
}

/* (dictionary, (key, value, ...), ...): these keys in this order, and no other. */
static int same_entries(PyObject *facts) {
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(facts); i += 2) {
        PyObject *dict = PyTuple_GET_ITEM(facts, i), *held = PyTuple_GET_ITEM(facts, i + 1);
        PyObject *key, *value;
        Py_ssize_t position = 0, at = 0, size = PyTuple_GET_SIZE(held);
        if (2 * PyDict_GET_SIZE(dict) != size)
            return 0;
        for (; at < size && PyDict_Next(dict, &position, &key, &value); at += 2) {
            PyObject *expected = PyTuple_GET_ITEM(held, at + 1);
            if (key != PyTuple_GET_ITEM(held, at) || (expected != value && expected != whatever))
                return 0;
        }
    }
    return 1;
}

/* (object, name, value, ...), each attribute looked up as Python does. */
static int same_attributes(PyObject *facts) {
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(facts); i += 3) {
        PyObject *value = PyObject_GetAttr(PyTuple_GET_ITEM(facts, i),
                                           PyTuple_GET_ITEM(facts, i + 1));
        if (value == NULL)
            return -1;
        Py_DECREF(value);
        if (value != PyTuple_GET_ITEM(facts, i + 2))
            return 0;
    }
    return 1;
}

/* Of two natural numbers; gives up the first, which is NULL if reading it failed. */
static int same_number(PyObject *read, PyObject *held) {
    if (read == NULL)
        return -1;
    int same = read == held || PyLong_AsSize_t(read) == PyLong_AsSize_t(held);
    Py_DECREF(read);
    return PyErr_Occurred() ? -1 : same; /* negative, or no number: somebody's accessor */
}

/* (tensor, version, address, ...). */
static int same_tensors(PyObject *facts) {
    PyTypeObject *known = NULL;
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(facts); i += 3) {
        PyObject *tensor = PyTuple_GET_ITEM(facts, i);
        if (Py_TYPE(tensor) != known) {
            known = Py_TYPE(tensor);
            if (!PyType_IsSubtype(known, PyDescr_TYPE(version_of)) ||
                !PyType_IsSubtype(known, PyDescr_TYPE(address_of)))
                return 0;
        }
        PyGetSetDef *getter = version_of->d_getset;
        PyObject *version = getter->get(tensor, getter->closure);
        int same = same_number(version, PyTuple_GET_ITEM(facts, i + 1));
        if (same != 1)
            return same;
        PyObject *address = address_of->d_method->ml_meth(tensor, NULL);
        same = same_number(address, PyTuple_GET_ITEM(facts, i + 2));
        if (same != 1)
            return same;
    }
    return 1;
}

/* [classes, entries, attributes, tensors, seen], or an exception. */
static int well_formed(PyObject *facts) {
    int holds = PyList_CheckExact(facts) && PyList_GET_SIZE(facts) == 5;
    for (Py_ssize_t i = 0; holds && i < 4; i++)
        holds = PyTuple_CheckExact(PyList_GET_ITEM(facts, i));
    if (!holds)
        PyErr_Format(PyExc_TypeError, "given %R; expected a list of four tuples and a number",
                     facts);
    return holds;
}

PyDoc_STRVAR(watch_doc, "watch(facts): to be called once, before unchanged(facts) is.");

static PyObject *watch(PyObject *self, PyObject *facts) {
    if (!well_formed(facts))
        return NULL;
    PyObject *entries = PyList_GET_ITEM(facts, 1);
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(entries); i += 2) {
        PyObject *dict = PyTuple_GET_ITEM(entries, i), *held = PyTuple_GET_ITEM(entries, i + 1);
        if (!PyDict_Check(dict) || !PyTuple_CheckExact(held)) {
            PyErr_SetString(PyExc_TypeError, "an entry is no dictionary with a tuple");
            return NULL;
        }
        if (is_watching() && watch_dict(dict) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(unchanged_doc, "unchanged(facts): whether all of them still hold.");

static PyObject *unchanged(PyObject *self, PyObject *facts) {
    if (!well_formed(facts))
        return NULL;
    int same = same_classes(PyList_GET_ITEM(facts, 0));
    unsigned long long now = events;
    if (same == 1 &&
        !(is_watching() && PyLong_AsUnsignedLongLong(PyList_GET_ITEM(facts, 4)) == now)) {
        same = same_entries(PyList_GET_ITEM(facts, 1));
        if (same == 1) {
            PyObject *seen = PyLong_FromUnsignedLongLong(now);
            if (seen == NULL || PyList_SetItem(facts, 4, seen) < 0)
                return NULL;
        }
    }
    if (same == 1)
        same = same_attributes(PyList_GET_ITEM(facts, 2));
    if (same == 1)
        same = same_tensors(PyList_GET_ITEM(facts, 3));
    if (same < 0)
        return NULL;
    return PyBool_FromLong(same);
}

PyDoc_STRVAR(read_doc, "read_tensors_by(torch.Tensor._version, torch.Tensor.data_ptr)");

static PyObject *read_tensors_by(PyObject *self, PyObject *arguments) {
    PyObject *getter, *method;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyGetSetDescr_Type, &getter, &PyMethodDescr_Type,
                          &method))
        return NULL;
    if (((PyMethodDescrObject *)method)->d_method->ml_flags != METH_NOARGS) {
        PyErr_SetString(PyExc_TypeError, "data_ptr takes arguments");
        return NULL;
    }
    Py_XSETREF(version_of, (PyGetSetDescrObject *)Py_NewRef(getter));
    Py_XSETREF(address_of, (PyMethodDescrObject *)Py_NewRef(method));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"watch", watch, METH_O, watch_doc},
    {"unchanged", unchanged, METH_O, unchanged_doc},
    {"read_tensors_by", read_tensors_by, METH_VARARGS, read_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fastlayer_unchanged", NULL, -1, methods,
};

PyMODINIT_FUNC PyInit_fastlayer_unchanged(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    whatever = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (whatever == NULL || PyModule_AddObjectRef(module, "WHATEVER", whatever) < 0) {
        Py_DECREF(module);
        return NULL;
    }
#if HAS_WATCHER
    watcher = PyDict_AddWatcher(count_event);
    if (watcher < 0)
        PyErr_Clear(); /* others took all there are */
#endif
    return module;
}
